"""Two panels over the same tokens: every scheme's perplexity, and its ratio to StreamingLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.quality.results import Results
from benchmarks.quality.schemes import STREAMING

POINTS = 64
"""Stretches that the lower panel averages over, about."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
"""Okabe and Ito's, told apart by colour-blind readers, and one more; then again, dashed."""


def plot(results: Results, path: Path) -> None:
    """Write the picture.

    Args:
        results: of at least one scheme.
        path: of a PNG.
    """
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    stretch = max(4096, results.setup["tokens"] // POINTS // 1024 * 1024)
    for i, name in enumerate(results.schemes):
        again, colour = divmod(i, len(COLOURS))
        style: dict[str, Any] = {"color": COLOURS[colour], "label": name, "linewidth": 1.3}
        style["linestyle"] = "--" if again else "-"
        if results.schemes[name]["kind"] == STREAMING:  # so that others show upon it
            style |= {"linewidth": 5, "alpha": 0.35}
        upper.plot(*_curve(results, name, 1024), **style)
        if results.reference_of(name) not in (None, name):
            lower.plot(*_curve(results, name, stretch, is_ratio=True), marker=".", **style)
    upper.set_yscale("log")
    for ticks in (upper.yaxis.set_major_formatter, upper.yaxis.set_minor_formatter):
        ticks(lambda y, _: f"{y:,.0f}")
    upper.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    upper.set_ylabel("perplexity of each 1,024 tokens (log)")
    upper.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    lower.axhline(1, color="grey", linewidth=0.8)
    lower.set_ylim(0.97, 1.05)
    lower.set_ylabel(f"ratio to StreamingLLM,\neach {stretch:,} tokens (cut at 1.05)")
    lower.set_xlabel("tokens read (dotted: the last position that the model was trained on)")
    for axes in (upper, lower):
        _decorate(axes, results.setup["trained_positions"])
    figure.suptitle(f"{results.setup['model']}, text {results.setup['text']!r}", fontsize=11)
    figure.savefig(path, dpi=110)


def _curve(
    results: Results, name: str, length: int, is_ratio: bool = False
) -> tuple[list[int], list[float]]:
    """Middles of stretches of so many tokens, and the values there."""
    of = results.ratio if is_ratio else results.perplexity
    total = results.schemes[name]["tokens"]
    points = [
        ((first + min(first + length, total)) // 2, of(name, first, min(first + length, total)))
        for first in range(0, total, length)
    ]
    known = [(x, y) for x, y in points if y is not None]
    return [x for x, _ in known], [y for _, y in known]


def _decorate(axes: Axes, trained_positions: int) -> None:
    axes.axvline(trained_positions, color="grey", linestyle=":", linewidth=1)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
