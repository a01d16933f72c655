"""`python -m vllm_bounded_kv.default_model`: make sure the model is there, print its folder."""

import sys

from vllm_bounded_kv.default_model.build import DefaultModelError, ensure_default_model

try:
    print(ensure_default_model())
except DefaultModelError as error:
    sys.exit(f"error: {error}")
