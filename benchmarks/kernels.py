"""`python -m benchmarks.kernels`: attention over a slot pool, by kernel; ends in one JSON line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import torch


def main() -> int:
    """Measure what this machine can; returns the exit status."""
    if not torch.cuda.is_available():
        print(
            "benchmarks.kernels: the Triton kernels need a GPU, and there is none", file=sys.stderr
        )
        return 1
    from benchmarks.kernels_gpu import device_name, gpu_rows

    setup = {"gpu": device_name(), "torch": torch.__version__, "dtype": "bfloat16"}
    print(json.dumps(setup), flush=True)
    print(json.dumps({"setup": setup, "gpu": table(gpu_rows())}))
    return 0


def table(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print rows as they come, under their names; returns them all."""
    seen: list[dict[str, Any]] = []
    names: list[str] = []
    for row in rows:
        if list(row) != names:
            names = list(row)
            print("  ".join(f"{name:>10}" for name in names))
        print("  ".join(f"{value:>10}" for value in row.values()), flush=True)
        seen.append(row)
    return seen


if __name__ == "__main__":
    sys.exit(main())
