"""`python -m benchmarks.kernels`: the slot pool's attention and planning, on this machine.

Attention against one SDPA call on the same number of keys that lie dense already: on the CPU, and
on a GPU where there is one; then the host's time to plan a step, in the pool's manager and, with
all of vLLM's metadata, in the engine. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.kernels_cpu import cpu_rows, plan_rows, profile
from benchmarks.kernels_engine import engine_rows
from benchmarks.kernels_gpu import gpu_rows
from benchmarks.machine import describe_machine


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument(
        "--profile", action="store_true", help="only show where a step of one token spends its time"
    )
    if parser.parse_args(argv).profile:
        print(profile())
        return 0
    parts = {"attention": cpu_rows, "planning": plan_rows}
    if find_spec("vllm") is not None:
        parts["metadata"] = engine_rows
    if torch.cuda.is_available():
        parts["attention_gpu"] = gpu_rows
    result: dict[str, Any] = {"setup": describe_machine()}
    for name, rows in parts.items():
        result[name] = table(tqdm(rows(), desc=name, file=sys.stderr))
    print(json.dumps(result))
    return 0


def table(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print rows as they come, under their names; returns them all."""
    seen: list[dict[str, Any]] = []
    names: list[str] = []
    for row in rows:
        if list(row) != names:
            names = list(row)
            tqdm.write("  ".join(f"{name:>10}" for name in names), file=sys.stdout)
        tqdm.write("  ".join(f"{value:>10}" for value in row.values()), file=sys.stdout)
        seen.append(row)
    return seen


if __name__ == "__main__":
    sys.exit(main())
