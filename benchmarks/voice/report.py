"""The evaluation as Markdown tables and as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.voice.words import KINDS

COLOURS = {"teacher": "#0072B2", "codec": "#E69F00", "system": "#009E73"}


def table(result: dict[str, Any]) -> str:
    """Word error rates by voice; then, if it was measured, the speed by streams."""
    rows = [["voice", *KINDS]]
    rows += [
        [name, *(f"{rates[kind]:.3f}" for kind in KINDS)] for name, rates in result["wer"].items()
    ]
    parts = [_markdown(rows)]
    if speed := result.get("one_core"):
        rows = [["streams", "real-time factor", "first audio, ms", "seconds of sound a second"]]
        rows += [
            [
                count,
                f"{found['rtf']:.2f}",
                f"{found['first_audio_s'] * 1e3:.0f}",
                f"{found['audio_s_per_s']:.1f}",
            ]
            for count, found in speed["streams"].items()
        ]
        parts.append(_markdown(rows))
    return "\n\n".join(parts)


def _markdown(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Write the picture, a PNG: words by voice, five minutes' pitch, and speed if measured."""
    speed = result.get("one_core")
    figure = Figure(figsize=(9, 9 if speed else 6), layout="constrained")
    axes = figure.subplots(3 if speed else 2, 1)
    _words(axes[0], result["wer"])
    _pitch(axes[1], result["five_minutes"])
    if speed:
        _speed(axes[2], speed)
    figure.savefig(path, dpi=110)


def _words(axes: Axes, rates: dict[str, dict[str, float]]) -> None:
    at = np.arange(len(rates))
    for i, kind in enumerate(KINDS):
        values = [by_kind[kind] for by_kind in rates.values()]
        axes.bar(at + (i - 1) * 0.27, values, 0.25, label=kind, color=COLOURS[kind])
    axes.set_xticks(at, list(rates))
    axes.set_ylabel("word error rate")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def _pitch(axes: Axes, long: dict[str, Any]) -> None:
    middle = long["median_octaves"]["all"]
    axes.plot(long["ends_s"], np.array(long["octaves"]) - middle, ".", color=COLOURS["system"])
    for side in (-0.1, 0.1):
        axes.axhline(side, color="grey", linestyle=":", linewidth=1)
    axes.set_xlabel("seconds of one stream")
    axes.set_ylabel("octaves from the\nmedian pitch, by sentence")
    axes.grid(alpha=0.3)


def _speed(axes: Axes, speed: dict[str, Any]) -> None:
    streams = list(speed["streams"])
    left = np.zeros(len(streams))
    by_process = [found["cpu_s_per_audio_s"] for found in speed["streams"].values()]
    for name in by_process[0]:
        if name == "decoder":  # a part of the process that it runs in
            continue
        values = np.array([found.get(name, 0.0) for found in by_process])
        axes.barh(streams, values, left=left, label=name)
        left += values
    axes.set_xlabel("processor seconds for a second of sound")
    axes.set_ylabel("streams")
    axes.legend(fontsize=8)
    axes.grid(axis="x", alpha=0.3)
