"""What is compared: how a stream is kept, and how its positions are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_bounded_kv.positions import LIMIT_IN_CAPACITIES

FULL, WINDOW, ABSOLUTE, STREAMING, REBASE = KINDS = (
    "full",
    "window",
    "absolute",
    "streaming",
    "rebase",
)
"""In the order that tables list them."""
FULL_TOKENS = 16_384
"""Full attention is read so far: its cost grows with the square, and it has broken by then."""


@dataclass(frozen=True)
class Scheme:
    """One way to read a stream."""

    kind: str
    """`full`: stock vLLM. `streaming`: the reference. The others: the plugin."""
    sink: int = 0
    window: int = 0
    """Last entries kept, the query's own included."""
    limit: int | None = None
    """Where `rebase` falls back; `None` for the others."""

    def __str__(self) -> str:
        if self.kind == FULL:
            return self.kind
        if self.kind == WINDOW:
            return f"{self.kind} W={self.window}"
        limit = "" if self.limit is None else f" L={self.limit}"
        return f"{self.kind} S={self.sink} W={self.window}{limit}"

    def num_tokens(self, num_tokens: int) -> int:
        """How much of a text of `num_tokens` it reads."""
        return min(num_tokens, FULL_TOKENS) if self.kind == FULL else num_tokens


def schemes(
    kinds: Sequence[str], sizes: Sequence[tuple[int, int]], limits: Sequence[int]
) -> list[Scheme]:
    """The schemes to run, in order.

    Args:
        kinds: of `KINDS`.
        sizes: (sink, window). The first gets every kind and limit, `window` with as many entries
            in all; the others the reference and `rebase` at the engine's default limit.
        limits: of `rebase`.

    Raises:
        ValueError: naming the option, its value and the limit.
    """
    for i, (sink, window) in enumerate(sizes):
        _require("--sink", sink, 0)
        _require("--window", window, 1)
        for limit in limits if i == 0 and REBASE in kinds else ():
            if limit <= sink + window:
                raise ValueError(f"--limits={limit}: must be above sink + window={sink + window}")
    (sink, window), *others = sizes
    chosen = []
    for kind in KINDS:
        if kind not in kinds:
            continue
        if kind == REBASE:
            chosen += [Scheme(kind, sink, window, limit) for limit in limits]
        elif kind == FULL:
            chosen.append(Scheme(kind))
        elif kind == WINDOW:
            chosen.append(Scheme(kind, 0, sink + window))
        else:
            chosen.append(Scheme(kind, sink, window))
    for sink, window in others:
        if STREAMING in kinds:
            chosen.append(Scheme(STREAMING, sink, window))
        if REBASE in kinds:
            limit = LIMIT_IN_CAPACITIES * (sink + window)
            chosen.append(Scheme(REBASE, sink, window, limit))
    return chosen


def _require(option: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{option}={value}: must be >= {minimum}")
