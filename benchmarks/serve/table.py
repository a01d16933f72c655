"""The Markdown table of a result: `python -m benchmarks.serve.table FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Entry = dict[str, Any]
Shown = Callable[[Entry], str]


def table(result: Result) -> str:
    """Peers as columns; each figure is a median, with the least and the most of the rounds."""
    peers = list(result["setup"]["peers"])
    lines = [["", *peers], ["---"] * (len(peers) + 1)]
    for row, x, label, shown in _lines(result["rows"]):
        found = {e["peer"]: e for e in result["rows"] if (e["row"], e["x"]) == (row, x)}
        lines.append([label, *(_cell(found.get(peer), shown) for peer in peers)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _lines(rows: list[Entry]) -> list[tuple[str, float, str, Shown]]:
    """Which row, at which x, under which name, and how a cell is written."""

    def xs(row: str) -> list[float]:
        return sorted({entry["x"] for entry in rows if entry["row"] == row})

    lines: list[tuple[str, float, str, Shown]] = []
    for name, label, scale in (
        ("itl_ms", "ms a token at position {:,}", 1),
        ("prefill_s", "seconds to read nearly {:,} tokens", 1),
        ("cache_bytes", "MB of cache held at {:,}", 1e-6),
    ):
        lines += [("latency", x, label.format(int(x)), _spread(name, scale)) for x in xs("latency")]
    for x in xs("closed"):
        label = f"tokens/s, {int(x)} clients, one pool"
        lines.append(("closed", x, label, _spread("tokens_per_s")))
        lines.append(("closed", x, "streams at once there, at most", _single("running_peak")))
        lines.append(("closed", x, "preemptions there", _single("preemptions")))
    for x in xs("open"):
        label = f"{x:g} requests/s (Poisson): "
        lines.append(("open", x, label + "ms to the first token, median", _spread("ttft_ms_p50")))
        lines.append(("open", x, "p95", _spread("ttft_ms_p95")))
        lines.append(("open", x, "ms a token, p95", _spread("itl_ms_p95")))
        lines.append(("open", x, "goodput, requests/s", _spread("goodput_per_s")))
    lines += [
        ("memory", x, "MB of all processes (PSS)", _single("pss_bytes", 1e-6)) for x in xs("memory")
    ]
    return lines


def _cell(entry: Entry | None, shown: Shown) -> str:
    if entry is None:
        return ""
    return "failed" if "failed" in entry else shown(entry)


def _spread(name: str, scale: float = 1) -> Shown:
    def shown(entry: Entry) -> str:
        if name not in entry:
            return ""
        middle, low, high = (_figure(value * scale) for value in entry[name])
        return middle if low == high else f"{middle} ({low} to {high})"

    return shown


def _single(name: str, scale: float = 1) -> Shown:
    return lambda entry: _figure(entry[name][0] * scale) if name in entry else ""


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def failures(result: Result) -> list[str]:
    """What failed, and why, one line each."""
    return [
        f"{entry['peer']}, {entry['row']} at {entry['x']:g}: failed: {entry['failed']}"
        for entry in result["rows"]
        if "failed" in entry
    ]


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
