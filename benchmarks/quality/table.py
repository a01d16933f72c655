"""Results as a Markdown table: `python -m benchmarks.quality.table FILE [TOKENS]`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.quality.results import Results

MAX_COLUMNS = 8
SHORTEST = 4096
"""Tokens a column, at least."""


def table(results: Results, num_tokens: int | None = None) -> str:
    """Perplexity in all and by equal stretches, and in all over StreamingLLM's of the same sizes.

    Args:
        results: of any schemes.
        num_tokens: of the text's start, whole blocks of 1,024; `None`: all.
    """
    total = num_tokens or results.setup["tokens"]
    length = SHORTEST
    while length * MAX_COLUMNS < total:
        length *= 2
    ends = [(first, min(first + length, total)) for first in range(0, total, length)]
    header = ["scheme", "all", "/ StreamingLLM", *(f"{a // 1024}-{b // 1024}k" for a, b in ends)]
    lines = [header, ["---"] * len(header)]
    for name in results.schemes:
        cells = [_cell(results.perplexity(name, 0, total)), _cell(results.ratio(name, 0, total), 4)]
        cells += [_cell(results.perplexity(name, a, b)) for a, b in ends]
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: float | None, digits: int = 2) -> str:
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    print(table(Results.load(Path(sys.argv[1])), *(int(n) for n in sys.argv[2:])))
