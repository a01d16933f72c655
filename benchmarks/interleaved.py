"""Times of several calls that are to be compared, on a machine that does other things as well."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

REPEATS = 15


def interleaved(calls: list[Callable[[], Any]], seconds: float = 0.02) -> list[float]:
    """Median seconds of a call, in rounds of about `seconds` that take each in turn."""
    counts = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        counts.append(max(1, round(seconds / max(time.perf_counter() - start, 1e-9))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, count, taken in zip(calls, counts, times, strict=True):
            start = time.perf_counter()
            for _ in range(count):
                call()
            taken.append((time.perf_counter() - start) / count)
    return [statistics.median(taken) for taken in times]
