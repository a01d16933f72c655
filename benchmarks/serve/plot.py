"""Four panels of a result: `python -m benchmarks.serve.plot FILE.json PICTURE.png`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.quality.plot import COLOURS

PANELS = (
    ("latency", "itl_ms", 1, "position in the stream", "ms a token, median"),
    (
        "latency",
        "prefill_s",
        1,
        "tokens of the prompt, about",
        "seconds to the first token",
    ),
    ("latency", "cache_bytes", 1e-6, "position in the stream", "MB that one stream's cache holds"),
    ("open", "ttft_ms_p95", 1, "requests a second (Poisson)", "ms to the first token, p95"),
)
"""Row, figure, scale, and the names of both axes."""


def plot(result: dict[str, Any], path: Path) -> None:
    """Write the picture: medians, with the least and the most of all rounds as bars.

    Args:
        result: what `python -m benchmarks serve` ends in.
        path: of a PNG.
    """
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    for axes, (row, name, scale, x_label, y_label) in zip(
        figure.subplots(2, 2).flat, PANELS, strict=True
    ):
        for i, peer in enumerate(result["setup"]["peers"]):
            entries = [
                entry
                for entry in result["rows"]
                if (entry["row"], entry["peer"]) == (row, peer) and name in entry
            ]
            _line(axes, sorted(entries, key=lambda e: e["x"]), name, scale, peer, COLOURS[i])
        if not axes.lines:  # a row that was not asked for
            axes.set_axis_off()
            continue
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.legend(*_legend(figure.axes), fontsize=8, loc="outside lower center", ncols=5)
    work = result["setup"]["work"]
    figure.suptitle(
        f"{work['model']}, sink {work['sink']} + window {work['window']}, "
        f"{work['threads']} threads",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)


def _legend(panels: list[Axes]) -> tuple[list[Any], list[str]]:
    """Handles and names of the panel that has most of them."""
    return max((axes.get_legend_handles_labels() for axes in panels), key=lambda both: len(both[1]))


def _line(
    axes: Axes, entries: list[dict[str, Any]], name: str, scale: float, peer: str, colour: str
) -> None:
    if not entries:
        return
    middle, low, high = ([e[name][i] * scale for e in entries] for i in range(3))
    bars = [
        [m - lo for m, lo in zip(middle, low, strict=True)],
        [hi - m for m, hi in zip(middle, high, strict=True)],
    ]
    axes.errorbar(
        [entry["x"] for entry in entries],
        middle,
        yerr=bars,
        label=peer,
        color=colour,
        marker="o",
        capsize=3,
    )


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
