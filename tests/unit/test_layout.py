"""Slot rows: brute force against a list of everything ever written.

The simulation knows only the contract's sentences. A slot is a list of stream indices, filled with
`GARBAGE` at first; a step is played token by token; every read is looked up, never computed.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_bounded_kv.config import BoundedKVConfig, SinkWindow
from vllm_bounded_kv.layout import (
    PADDING_ROW,
    ROW_INTS,
    RowPlan,
    plan_row,
    retained_ranges,
    window_before_step,
)

GARBAGE = -1
CASES = 20_000


@dataclass
class Case:
    """One stream: its policy, its slot's geometry, and the spans of its steps."""

    policy: SinkWindow
    source_len: int
    spare_sink: int  # capacity that another source length of the same model needs
    spare_ring: int
    reverse: bool
    spans: list[int]

    @property
    def sink_capacity(self) -> int:
        return max(0, self.policy.sink - self.source_len) + self.spare_sink

    @property
    def slot_tokens(self) -> int:
        return self.sink_capacity + self.policy.window + self.spare_ring


def brute_force_retained(n: int, span: int, policy: SinkWindow) -> list[int]:
    last = policy.window
    if policy.window_includes_step:
        last = policy.window - span if span < policy.window else 0
    return [i for i in range(n) if i < policy.sink or n - i <= last]


def read_all(row: RowPlan, source_len: int, slot: list[int]) -> list[int]:
    """Stream indices that a row reads, from a source whose entry `i` holds `i`."""
    source = list(range(source_len))
    entries: list[int] = []
    for place, (start, length) in zip((source, slot, source, slot, slot), row.reads, strict=True):
        assert start >= 0
        assert length >= 0
        assert start + length <= len(place), "reads beyond its place"
        entries += place[start : start + length]
    return entries


def write_all(row: RowPlan, joins_as: dict[int, int], slot: list[int], reverse: bool) -> list[int]:
    """Store stream indices of the step's tokens; returns the slot entries that were touched."""
    touched: list[int] = []
    for offset, start, length in row.writes:
        for j in range(length):
            token = offset - j if reverse else offset + j
            slot[start + j] = joins_as[token]  # KeyError: a token that does not join the stream
            touched.append(start + j)
    return touched


def expected_slot(case: Case, n: int, before: list[int], span: int) -> list[int]:
    """The slot after entries `[n, n + span)` were written one at a time, as the contract places."""
    slot = list(before)
    sink, window = case.policy.sink, case.policy.window
    for i in range(n, n + span):
        if i < sink:
            slot[i - case.source_len] = i
        elif window:
            slot[case.sink_capacity + (i - sink) % window] = i
    return slot


def play(case: Case) -> None:
    """Run a stream and compare every step with the brute force."""
    slot = [GARBAGE] * case.slot_tokens
    written = 0
    for span in case.spans:
        n = case.source_len + written
        row = plan_row(
            case.policy,
            sink_capacity=case.sink_capacity,
            slot=3,
            source_len=case.source_len,
            written=written,
            span=span,
            source=5,
            reverse_step_order=case.reverse,
        )
        entries = read_all(row, case.source_len, slot)
        assert GARBAGE not in entries
        assert entries == brute_force_retained(n, span, case.policy)
        assert row.num_retained == len(entries)
        if case.reverse:
            joins_as = {n + span - 1 - i: i for i in range(n, n + span)}
        else:
            joins_as = {i - n: i for i in range(n, n + span)}
        expected = expected_slot(case, n, slot, span)
        touched = write_all(row, joins_as, slot, case.reverse)
        assert slot == expected
        assert len(touched) == len(set(touched)), "an entry is stored twice in one step"
        written += span


cases = st.builds(
    Case,
    policy=st.builds(SinkWindow, st.integers(0, 7), st.integers(0, 7), st.booleans()),
    source_len=st.integers(0, 12),
    spare_sink=st.integers(0, 2),
    spare_ring=st.integers(0, 2),
    reverse=st.booleans(),
    spans=st.binary(min_size=1, max_size=7).map(lambda b: [byte % 10 for byte in b]),
)


@settings(max_examples=CASES, deadline=None, derandomize=True, database=None)
@given(cases)
def test_random_streams_read_what_is_retained_and_write_where_it_belongs(case: Case) -> None:
    play(case)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("includes", [False, True])
def test_every_small_stream_of_one_span(includes: bool, reverse: bool) -> None:
    """Every sink, window, source length and constant span around the borders W-1, W, W+1."""
    for sink in range(4):
        for window in range(5):
            for source_len in range(sink + window + 2):
                for span in range(window + 3):
                    policy = SinkWindow(sink, window, includes)
                    count = 2 * (sink + window) // max(span, 1) + 3
                    play(Case(policy, source_len, 0, 0, reverse, [span] * count))


@pytest.mark.parametrize(("span", "kept"), [(3, 1), (4, 0), (5, 0)])
def test_window_that_includes_the_step(span: int, kept: int) -> None:
    policy = SinkWindow(2, 4, window_includes_step=True)
    assert window_before_step(policy, span) == kept
    assert retained_ranges(20, span, policy) == (range(2), range(20 - kept, 20))


def test_a_stream_shorter_than_its_sink_has_no_window() -> None:
    in_sink, in_window = retained_ranges(3, 1, SinkWindow(5, 4))
    assert in_sink == range(3)
    assert list(in_window) == []


def test_five_reads_and_three_writes_by_hand() -> None:
    """A sink across source and slot cannot meet a window in the source; each half by hand."""
    across = plan_row(
        SinkWindow(4, 5), sink_capacity=3, slot=7, source_len=2, written=9, span=6, source=-1
    )
    # n = 11: sink 0-1 in the source, 2-3 written; window 6-10, in the ring at 2, 3, 4, 0, 1.
    assert across.as_ints()[:12] == (7, -1, 0, 2, 0, 2, 0, 0, 5, 3, 3, 2)
    # entries 12-16 (the step's last five, tokens 1-5) go to ring 3, 4, 0, 1, 2.
    assert across.as_ints()[12:] == (0, 0, 0, 1, 6, 2, 3, 3, 3)

    inside = plan_row(SinkWindow(1, 6), sink_capacity=0, slot=0, source_len=10, written=2, span=1)
    # n = 12: sink 0, window 6-11: 6-9 in the source, 10-11 in the ring at (10 - 1) % 6 = 3.
    assert inside.as_ints()[:12] == (0, 0, 0, 1, 0, 0, 6, 4, 3, 2, 0, 0)
    assert inside.as_ints()[12:] == (0, 0, 0, 0, 5, 1, 0, 0, 0)


def test_reverse_counts_down_from_the_last_token_that_joins() -> None:
    row = plan_row(
        SinkWindow(2, 3),
        sink_capacity=2,
        slot=0,
        source_len=0,
        written=1,
        span=3,
        reverse_step_order=True,
    )
    # entries 1, 2, 3 are tokens 2, 1, 0: one sink entry, two in the ring.
    assert row.writes.sink == (2, 1, 1)
    assert row.writes.ring == (1, 2, 2)
    assert row.writes.ring_wrapped == (0, 0, 0)


def test_long_steps_write_only_the_last_window_beyond_the_sink() -> None:
    row = plan_row(SinkWindow(2, 3), sink_capacity=2, slot=0, source_len=0, written=0, span=50)
    assert row.writes.sink == (0, 0, 2)
    assert sum(write.length for write in row.writes) == 2 + 3


def test_planning_twice_gives_the_same_row() -> None:
    def once() -> RowPlan:
        return plan_row(SinkWindow(2, 3), sink_capacity=2, slot=1, source_len=1, written=7, span=2)

    assert once() == once()


def test_a_padding_row_is_all_zeros() -> None:
    assert PADDING_ROW.as_ints() == (0,) * ROW_INTS


def test_slots_sized_by_the_config_hold_every_source_length() -> None:
    """A callable policy: one slot geometry must serve all source lengths."""
    config = BoundedKVConfig(
        num_layers=1,
        num_heads=1,
        head_dim=1,
        rows_per_request=1,
        min_source_len=1,
        max_source_len=9,
        retention=lambda s: SinkWindow(sink=(3 * s) % 8, window=(5 * s) % 6),
    )
    for source_len in range(1, 10):
        policy = config.retention_for(source_len)
        case = Case(
            policy,
            source_len,
            spare_sink=config.sink_capacity - max(0, policy.sink - source_len),
            spare_ring=config.window_capacity - policy.window,
            reverse=False,
            spans=[1, 3, 0, 7, 2] * 3,
        )
        assert case.slot_tokens == config.slot_tokens
        play(case)
