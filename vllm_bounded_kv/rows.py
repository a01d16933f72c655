"""`layout.plan_row` for a whole step at once, in NumPy: the twin that runs in the step path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_bounded_kv.config import BoundedKVConfig
from vllm_bounded_kv.layout import MAX_READS, MAX_WRITES, ROW_INTS

Ints = NDArray[np.int64]

FIRST_READ = 2
FIRST_WRITE = FIRST_READ + 2 * MAX_READS

AnyInts = TypeVar("AnyInts", np.int32, np.int64)


def reads_of(table: NDArray[AnyInts]) -> NDArray[AnyInts]:
    """`[B, MAX_READS, 2]` start and length of every read of `table` `[B, ROW_INTS]`."""
    return table[:, FIRST_READ:FIRST_WRITE].reshape(-1, MAX_READS, 2)


def writes_of(table: NDArray[AnyInts]) -> NDArray[AnyInts]:
    """`[B, MAX_WRITES, 3]` offset, start and length of every write of `table` `[B, ROW_INTS]`."""
    return table[:, FIRST_WRITE:ROW_INTS].reshape(-1, MAX_WRITES, 3)


@dataclass(frozen=True)
class Policies:
    """A config's retention by source length, as arrays that a step can index."""

    sink: Ints
    """`[max_source_len - min_source_len + 1]`, as the others."""
    window: Ints
    """Also the modulus of the ring."""
    step_share: Ints
    """1 where the window counts the step's own tokens, else 0."""
    min_source_len: int
    sink_capacity: int
    reverse_step_order: bool

    @classmethod
    def of(cls, config: BoundedKVConfig) -> Policies:
        """The policies of every source length that `config` allows."""
        lengths = range(config.min_source_len, config.max_source_len + 1)
        policies = [config.retention_for(length) for length in lengths]
        return cls(
            sink=np.array([p.sink for p in policies], dtype=np.int64),
            window=np.array([p.window for p in policies], dtype=np.int64),
            step_share=np.array([p.window_includes_step for p in policies], dtype=np.int64),
            min_source_len=config.min_source_len,
            sink_capacity=config.sink_capacity,
            reverse_step_order=config.reverse_step_order,
        )


def plan_rows(policies: Policies, segments: Ints, out: NDArray[np.int32]) -> None:
    """Write one row per segment; what every number means is `layout.plan_row`'s to say.

    Args:
        policies: of the config.
        segments: `[5, B]`: slot, source, source length, entries written, span.
        out: `[B, ROW_INTS]`, all of it overwritten.
    """
    slot, source, source_len, written, span = segments
    policy = source_len - policies.min_source_len
    sink, window = policies.sink[policy], policies.window[policy]
    n = source_len + written
    seen = np.maximum(window - span * policies.step_share[policy], 0)
    sink_end = np.minimum(sink, n)
    sink_split = np.minimum(sink_end, source_len)
    window_start = np.maximum(sink, n - seen)
    ring_start = np.maximum(window_start, source_len)

    out[:, 0] = slot
    out[:, 1] = source
    reads = out[:, FIRST_READ:FIRST_WRITE]
    reads[:, 0] = reads[:, 2] = 0
    reads[:, 1] = sink_split
    reads[:, 3] = sink_end - sink_split
    reads[:, 5] = in_source = np.maximum(source_len - window_start, 0)
    reads[:, 4] = window_start * (in_source > 0)
    _ring_runs(policies, sink, window, ring_start, n, reads[:, 6:8], reads[:, 8:10])

    end = n + span
    # Older entries of the step would be overwritten within it, in no certain order on a device.
    kept_from = np.maximum(np.maximum(sink, n), end - window)
    writes = out[:, FIRST_WRITE:]
    writes[:, 2] = in_sink = np.maximum(np.minimum(sink, end) - n, 0)
    writes[:, 1] = written * (in_sink > 0)
    _ring_runs(policies, sink, window, kept_from, end, writes[:, 4:6], writes[:, 7:9])
    first_entries = np.stack([n, kept_from, kept_from + writes[:, 5]], axis=1)
    if policies.reverse_step_order:
        offsets = (end - 1)[:, None] - first_entries
    else:
        offsets = first_entries - n[:, None]
    writes[:, 0::3] = offsets * (writes[:, 2::3] > 0)


def _ring_runs(
    policies: Policies,
    sink: Ints,
    window: Ints,
    begin: Ints,
    end: Ints,
    first: NDArray[np.int32],
    rest: NDArray[np.int32],
) -> None:
    """Write the slot runs `(start, length)` of stream entries `[begin, end)`."""
    length = np.maximum(end - begin, 0)
    place = (begin - sink) % np.maximum(window, 1)
    first_len = np.minimum(length, window - place)
    rest_len = length - first_len
    first[:, 0] = (policies.sink_capacity + place) * (first_len > 0)
    first[:, 1] = first_len
    rest[:, 0] = policies.sink_capacity * (rest_len > 0)
    rest[:, 1] = rest_len
