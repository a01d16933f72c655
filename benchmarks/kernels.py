"""`python -m benchmarks.kernels`: the slot pool's attention and planning, on this machine's CPU.

Attention against one SDPA call on the same number of keys that lie dense already; then the host's
time to plan a step. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tqdm import tqdm

from benchmarks.kernels_cpu import cpu_rows, plan_rows, profile
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
    result: dict[str, Any] = {"setup": describe_machine()}
    for name, rows in (("attention", cpu_rows()), ("planning", plan_rows())):
        result[name] = [_shown(row) for row in tqdm(rows, desc=name, file=sys.stderr)]
    print(json.dumps(result))
    return 0


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    tqdm.write("  ".join(f"{key} {value}" for key, value in row.items()), file=sys.stdout)
    return row


if __name__ == "__main__":
    sys.exit(main())
