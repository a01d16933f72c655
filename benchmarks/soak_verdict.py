"""What a soak must show, as arithmetic over what was read: nothing here runs or waits.

Contract: a stream of any length holds the same blocks throughout; all processes of the server
together grow by a bounded number of bytes a token; the last tenth of the stream is as fast as the
second (the first warms up).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import linear_regression, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_PARTS = 10
WARM_UP = 1 / NUM_PARTS
"""Share of the stream that memory and latency are not judged by."""
MAX_BYTES_PER_TOKEN = 200.0
MAX_ITL_RATIO = 1.03
MIN_READINGS = 20


@dataclass(frozen=True)
class Reading:
    """The server at one moment of the long stream."""

    tokens: int
    """That the client had received."""
    blocks: int
    """Held by the long stream; 0: it had ended."""
    slots_used: int
    """By all streams."""
    rss: dict[str, int]
    """Resident bytes of each process."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Processor time of each process so far, in seconds."""


@dataclass(frozen=True)
class Arrivals:
    """When the long stream's tokens arrived: one entry a piece, of one or more tokens."""

    seconds: Sequence[float]
    num_tokens: Sequence[int]

    def itl_ms(self) -> NDArray[np.float64]:
        """Inter-token latency of every token after the first piece, in ms.

        The tokens of one piece share the time since the piece before.
        """
        counts = np.asarray(self.num_tokens[1:], dtype=np.int64)
        gaps = np.diff(np.asarray(self.seconds, dtype=np.float64)) * 1e3
        return np.repeat(gaps / np.maximum(counts, 1), counts)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles, in ms."""

    median: float
    quartiles: tuple[float, float]

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Spread:
        """Of any number of values above 0."""
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
        return cls(round(float(middle), 4), (round(float(low), 4), round(float(high), 4)))

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """What is allowed."""

    slots: int
    """Streams at once."""
    bytes_per_token: float = MAX_BYTES_PER_TOKEN
    itl_ratio: float = MAX_ITL_RATIO
    late: float = 0.05
    """Share of the readings, the last ones, that may come after the stream has ended: the engine
    does not wait for a client that is behind."""
    noise_bytes: int = 0
    """Growth over the whole stream that is not the stream's: short runs are still warming up."""


@dataclass(frozen=True)
class Verdict:
    """Figures, and what is wrong with them."""

    blocks: list[int]
    """Different numbers of blocks that the long stream held: one, if all is well."""
    max_slots_used: int
    median_slots_used: float
    num_readings: int
    bytes_per_token: float
    """Growth of all processes together; see `slope`."""
    bytes_per_token_of: dict[str, float]
    rss_mb: dict[str, list[float]]
    """Of each process and in all, at the start of each tenth and at the last reading."""
    itl_ratio: float
    """Median of the last tenth over that of the second."""
    itl_ms: list[Spread]
    """Of each tenth."""
    cpu_ms_per_token: dict[str, list[float]]
    """Processor time of each process in each tenth; engines and workers also spin while they wait.
    Not judged, but the machine's other work hardly shows in it."""
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def slope(tokens: Sequence[int], values: Sequence[int]) -> float:
    """Least-squares growth of `values` a token."""
    return float(linear_regression(tokens, values).slope)


def warm(readings: Sequence[Reading], num_tokens: int) -> list[Reading]:
    """Those after the warm-up of a stream of `num_tokens`."""
    return [r for r in readings if r.tokens >= WARM_UP * num_tokens]


def growth(readings: Sequence[Reading]) -> tuple[float, dict[str, float]]:
    """Bytes a token of all processes together, and of each. A process that is absent holds 0."""
    tokens = [r.tokens for r in readings]
    names = sorted({name for r in readings for name in r.rss})
    each = {name: slope(tokens, [r.rss.get(name, 0) for r in readings]) for name in names}
    return slope(tokens, [sum(r.rss.values()) for r in readings]), each


def parts(values: NDArray[np.float64], num_parts: int = NUM_PARTS) -> list[NDArray[np.float64]]:
    """`values` in consecutive parts of equal length, give or take one."""
    return np.array_split(values, num_parts)


def judge(
    readings: Sequence[Reading], arrivals: Arrivals, leftover_blocks: int, limits: Limits
) -> Verdict:
    """The verdict on one long stream.

    Args:
        readings: in the order of the stream, from its first token on.
        leftover_blocks: blocks not back in the pool when all streams had ended.

    Raises:
        ValueError: with too few readings to judge by.
    """
    if len(readings) < MIN_READINGS:
        raise ValueError(f"{len(readings)} readings are too few: at least {MIN_READINGS}")
    num_tokens = sum(arrivals.num_tokens)
    late = warm(readings, num_tokens)
    total, each = growth(late)
    spreads = [Spread.of(part) for part in parts(arrivals.itl_ms())]
    ratio = spreads[-1].median / spreads[1].median
    running = _while_running(readings, limits.late)
    verdict = Verdict(
        blocks=sorted({r.blocks for r in running}),
        max_slots_used=max(r.slots_used for r in readings),
        median_slots_used=median(r.slots_used for r in running),
        num_readings=len(readings),
        bytes_per_token=round(total, 2),
        bytes_per_token_of={name: round(value, 2) for name, value in each.items()},
        rss_mb=_rss_mb(readings, num_tokens),
        itl_ratio=round(ratio, 4),
        itl_ms=spreads,
        cpu_ms_per_token=_cpu_ms(readings, num_tokens),
    )
    allowed = limits.bytes_per_token + limits.noise_bytes / num_tokens
    checks = [
        (
            len(verdict.blocks) != 1 or verdict.blocks[0] < 1,
            f"the stream held {verdict.blocks} blocks: not one number of them throughout",
        ),
        (
            verdict.max_slots_used > limits.slots,
            f"{verdict.max_slots_used} slots were used, but only {limits.slots} streams ran",
        ),
        (leftover_blocks != 0, f"{leftover_blocks} blocks were not given back"),
        (
            total > allowed,
            f"the server grew by {total:.1f} bytes a token, above {allowed:.1f}: "
            f"{verdict.bytes_per_token_of}",
        ),
        (
            ratio > limits.itl_ratio,
            f"the last tenth's median latency is {ratio:.3f} times the second tenth's, above "
            f"{limits.itl_ratio}",
        ),
    ]
    verdict.failures.extend(message for is_wrong, message in checks if is_wrong)
    return verdict


def _while_running(readings: Sequence[Reading], late: float) -> list[Reading]:
    """Without those of the last that came after the stream's end, up to a share of `late`."""
    end = len(readings)
    while end > (1 - late) * len(readings) and readings[end - 1].blocks == 0:
        end -= 1
    return list(readings[:end])


def _at_tenths(readings: Sequence[Reading], num_tokens: int) -> list[Reading]:
    """The first reading of each tenth, and the last of all."""
    starts = [i * num_tokens / NUM_PARTS for i in range(NUM_PARTS)]
    first = [next((r for r in readings if r.tokens >= s), readings[-1]) for s in starts]
    return [*first, readings[-1]]


def _rss_mb(readings: Sequence[Reading], num_tokens: int) -> dict[str, list[float]]:
    chosen = _at_tenths(readings, num_tokens)
    names = sorted({name for r in chosen for name in r.rss})
    table = {name: [r.rss.get(name, 0) for r in chosen] for name in names}
    table["all"] = [sum(r.rss.values()) for r in chosen]
    return {name: [round(value / 1e6, 2) for value in values] for name, values in table.items()}


def _cpu_ms(readings: Sequence[Reading], num_tokens: int) -> dict[str, list[float]]:
    chosen = list(pairwise(_at_tenths(readings, num_tokens)))
    names = sorted({name for r in readings for name in r.cpu_s})
    return {
        name: [
            round((b.cpu_s.get(name, 0) - a.cpu_s.get(name, 0)) * 1e3 / (b.tokens - a.tokens), 3)
            for a, b in chosen
            if b.tokens > a.tokens
        ]
        for name in names
    }
