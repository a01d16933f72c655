"""`python -m vllm_bounded_kv.tools`: `bounded-kv`."""

import sys

from vllm_bounded_kv.tools.main import main

if __name__ == "__main__":
    sys.exit(main())
