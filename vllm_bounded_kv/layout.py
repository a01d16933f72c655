"""Where the entries of a bounded stream live, in plain ints; the reference for every kernel.

Two storages, one rule of retention (the first `sink` entries and the last few):

* **Slots** (`plan_row`): a request owns `sink_capacity` entries for the written part of its sink,
  then a ring. Entry `i` of the stream, once written, sits at `i - source_len` while `i < sink`,
  and at `(i - sink) mod window` of the ring after that. A step is planned on the host as one short
  row of ints that says what to read and what to write.
* **Compact index** (`compact_index` and below it): sink and ring lie one after the other in a
  request's fixed row of blocks, and the valid entries are always a prefix of it.

Invariant of both: an entry is read only where its stream's position says that it was written, so
what an earlier owner left behind never matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MAX_READS = 5
MAX_WRITES = 3
ROW_INTS = 2 + 2 * MAX_READS + 3 * MAX_WRITES
"""Length of a row as flat ints: slot, source, the reads, the writes."""


class Retention(Protocol):
    """The fields of a sink-and-window policy that the arithmetic uses; all in entries."""

    @property
    def sink(self) -> int:
        """Entries kept from the start of the stream."""

    @property
    def window(self) -> int:
        """Most recent entries kept."""

    @property
    def window_includes_step(self) -> bool:
        """Whether the window counts the step's own entries."""


class Read(NamedTuple):
    """A run of consecutive entries to read, from the source or from the slot."""

    start: int = 0
    """First entry: of the source's, or of the slot's, by the read's place in the row."""
    length: int = 0
    """Entries; 0 reads nothing."""


class Write(NamedTuple):
    """A run of a step's tokens to store in consecutive entries of the slot."""

    offset: int = 0
    """Step token that goes first; the others follow it, or precede it in reverse order."""
    start: int = 0
    """Entry of the slot that takes it."""
    length: int = 0
    """Entries; 0 writes nothing."""


class Reads(NamedTuple):
    """What a step reads, in stream order."""

    sink_in_source: Read = Read()
    sink_in_slot: Read = Read()
    window_in_source: Read = Read()
    ring: Read = Read()
    ring_wrapped: Read = Read()
    """The rest of the ring's run, from the ring's first entry on."""


class Writes(NamedTuple):
    """What a step writes, in stream order, after everything was read."""

    sink: Write = Write()
    ring: Write = Write()
    ring_wrapped: Write = Write()


@dataclass(frozen=True)
class RowPlan:
    """All that one segment's attention and stores need to know. All zeros: a padding row."""

    slot: int
    """The request's slot in the pool."""
    source: int
    """Index among the shared sources; -1: the segment's own entry of the per-row sources."""
    reads: Reads
    writes: Writes

    @property
    def num_retained(self) -> int:
        """Entries read: the `m` of the retained order."""
        return sum(read.length for read in self.reads)

    @classmethod
    def from_ints(cls, ints: Sequence[int]) -> "RowPlan":
        """The row that `as_ints` gives as `ints`."""
        slot, source, *rest = ints
        reads, writes = rest[: 2 * MAX_READS], rest[2 * MAX_READS :]
        return cls(
            slot,
            source,
            Reads(*(Read(*reads[i : i + 2]) for i in range(0, len(reads), 2))),
            Writes(*(Write(*writes[i : i + 3]) for i in range(0, len(writes), 3))),
        )

    def as_ints(self) -> tuple[int, ...]:
        """`ROW_INTS` ints: slot, source, `(start, length)` x 5, `(offset, start, length)` x 3."""
        flat_reads = (value for read in self.reads for value in read)
        flat_writes = (value for write in self.writes for value in write)
        return (self.slot, self.source, *flat_reads, *flat_writes)


PADDING_ROW = RowPlan(0, 0, Reads(), Writes())
"""Reads nothing and writes nothing."""


def window_before_step(retention: Retention, span: int) -> int:
    """Last entries of the stream that a step adding `span` tokens still sees."""
    if retention.window_includes_step:
        return max(retention.window - span, 0)
    return retention.window


def retained_ranges(num_entries: int, span: int, retention: Retention) -> tuple[range, range]:
    """Stream entries retained before a step: those inside the sink, and those after it."""
    sink_end = min(retention.sink, num_entries)
    window_start = num_entries - window_before_step(retention, span)
    return range(sink_end), range(max(retention.sink, window_start), num_entries)


def plan_row(
    retention: Retention,
    *,
    sink_capacity: int,
    slot: int,
    source_len: int,
    written: int,
    span: int,
    source: int = 0,
    reverse_step_order: bool = False,
) -> RowPlan:
    """What one segment reads and writes in a step. Pure: planning twice changes nothing.

    Args:
        retention: the policy of this source length; its `window` is the modulus of the ring.
        sink_capacity: entries of a slot ahead of its ring; the same for every request.
        slot, source: carried into the row as they are.
        source_len, written: where the stream stands; it holds their sum.
        span: tokens of the step that join the stream, 0 or more.
        reverse_step_order: whether they join last-first; a write's tokens then count down.
    """
    num_entries = source_len + written
    return RowPlan(
        slot,
        source,
        _plan_reads(retention, sink_capacity, source_len, num_entries, span),
        _plan_writes(retention, sink_capacity, source_len, num_entries, span, reverse_step_order),
    )


def _plan_reads(
    retention: Retention,
    sink_capacity: int,
    source_len: int,
    num_entries: int,
    span: int,
) -> Reads:
    in_sink, in_window = retained_ranges(num_entries, span, retention)
    sink_split = min(in_sink.stop, source_len)
    ring_start = max(in_window.start, source_len)
    first, rest = _ring_runs(retention, sink_capacity, ring_start, num_entries)
    return Reads(
        sink_in_source=_read(0, sink_split),
        sink_in_slot=_read(0, in_sink.stop - sink_split),
        window_in_source=_read(in_window.start, source_len - in_window.start),
        ring=_read(*first),
        ring_wrapped=_read(*rest),
    )


def _plan_writes(
    retention: Retention,
    sink_capacity: int,
    source_len: int,
    num_entries: int,
    span: int,
    reverse: bool,
) -> Writes:
    end = num_entries + span
    # Older entries of the step would be overwritten within it, in no certain order on a device.
    ring_start = max(retention.sink, num_entries, end - retention.window)
    first, rest = _ring_runs(retention, sink_capacity, ring_start, end)

    def write(entry: int, start: int, length: int) -> Write:
        if length <= 0:
            return Write()
        return Write(end - 1 - entry if reverse else entry - num_entries, start, length)

    return Writes(
        sink=write(
            num_entries,
            num_entries - source_len,
            min(retention.sink, end) - num_entries,
        ),
        ring=write(ring_start, *first),
        ring_wrapped=write(ring_start + first[1], *rest),
    )


def _ring_runs(
    retention: Retention, sink_capacity: int, begin: int, end: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Slot runs `(start, length)` of stream entries `[begin, end)`: to the ring's end, and on."""
    if end <= begin:  # also the only case of an empty ring, which has no modulus
        return (0, 0), (0, 0)
    place = (begin - retention.sink) % retention.window
    first = min(end - begin, retention.window - place)
    return (sink_capacity + place, first), (sink_capacity, end - begin - first)


def _read(start: int, length: int) -> Read:
    return Read(start, length) if length > 0 else Read()


def ring_capacity(window: int, window_includes_step: bool) -> int:
    """Ring entries `R` of a per-query window: the query's own is one of `window`, or one more.

    Raises:
        ValueError: nothing would be left to attend (`R < 1`).
    """
    ring = window if window_includes_step else window + 1
    if ring < 1:
        raise ValueError(
            f"window must leave a ring of at least 1 entry, got window {window} "
            f"with window_includes_step {window_includes_step}"
        )
    return ring


def attends(
    query: int, key: int, sink: int, window: int, window_includes_step: bool = True
) -> bool:
    """Whether the query at a stream position sees the key at another, under a per-query window.

    With `R = ring_capacity(window, window_includes_step)`: keys in `[0, sink)` that are not after
    the query, and keys in `(query - R, query]`.
    """
    if not 0 <= key <= query:
        return False
    return key < sink or key > query - ring_capacity(window, window_includes_step)


def compact_index(position: int, sink: int, ring: int) -> int:
    """Entry of a request's block row that holds stream position `position`."""
    if position < sink + ring:
        return position
    return sink + (position - sink) % ring


def num_valid(num_entries: int, sink: int, ring: int) -> int:
    """Entries of the block row that hold something once the stream has `num_entries`: a prefix."""
    return min(num_entries, sink + ring)


def position_at_entry(entry: int, num_entries: int, sink: int, ring: int) -> int:
    """Stream position held by an entry of the block row: the inverse of `compact_index`.

    Raises:
        ValueError: `entry` holds nothing yet when the stream has `num_entries`.
    """
    valid = num_valid(num_entries, sink, ring)
    if not 0 <= entry < valid:
        raise ValueError(f"entry must be in [0, {valid}), got {entry}")
    if entry < sink:
        return entry
    return entry + (num_entries - 1 - entry) // ring * ring


def slot_blocks(sink: int, ring: int, block_size: int) -> int:
    """Blocks that a request needs, all at admission, whatever the length of its stream."""
    return -(-(sink + ring) // block_size)


def immutable_blocks(sink: int, block_size: int) -> int:
    """Leading blocks that lie wholly inside the sink: never overwritten, so safe to share."""
    return sink // block_size
