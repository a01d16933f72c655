"""The compact index of the engine's block rows, exhaustively over small streams.

Brute force: write positions one after the other into a row at the contract's place and look.
"""

import pytest

from vllm_bounded_kv.layout import (
    attends,
    compact_index,
    immutable_blocks,
    num_valid,
    position_at_entry,
    ring_capacity,
    slot_blocks,
)

SINKS = range(5)
RINGS = range(1, 7)


def test_the_valid_entries_are_a_prefix_that_holds_sink_and_last_ring() -> None:
    for sink in SINKS:
        for ring in RINGS:
            row: dict[int, int] = {}
            for n in range(4 * (sink + ring) + 3):
                valid = num_valid(n, sink, ring)
                assert sorted(row) == list(range(valid))
                kept = {p for p in range(n) if p < sink or p >= n - ring}
                assert set(row.values()) == kept
                for entry in range(valid):
                    assert position_at_entry(entry, n, sink, ring) == row[entry]
                row[compact_index(n, sink, ring)] = n


def test_a_token_overwrites_the_one_that_its_query_no_longer_sees() -> None:
    """After position `p` is written, the row holds exactly the keys that query `p` attends."""
    for sink in SINKS:
        for window in range(1, 6):
            for includes in (False, True):
                ring = ring_capacity(window, includes)
                for p in range(4 * (sink + ring)):
                    n = p + 1
                    held = {
                        position_at_entry(c, n, sink, ring) for c in range(num_valid(n, sink, ring))
                    }
                    seen = {k for k in range(n + 3) if attends(p, k, sink, window, includes)}
                    assert held == seen


@pytest.mark.parametrize("entry", [-1, 5, 6])
def test_an_entry_that_holds_nothing_has_no_position(entry: int) -> None:
    with pytest.raises(ValueError, match=rf"entry must be in \[0, 5\), got {entry}"):
        position_at_entry(entry, num_entries=5, sink=2, ring=4)


@pytest.mark.parametrize(
    ("window", "includes", "distances"),
    [(1, True, [0]), (3, True, [0, 1, 2]), (3, False, [0, 1, 2, 3]), (0, False, [0])],
)
def test_the_window_convention(window: int, includes: bool, distances: list[int]) -> None:
    """`(p - R, p]`: the query's own token counts, or is one more."""
    seen = [d for d in range(-2, 20) if attends(20, 20 - d, 0, window, includes)]
    assert seen == distances
    assert ring_capacity(window, includes) == len(distances)


def test_the_convention_defaults_to_the_engines() -> None:
    assert [d for d in range(9) if attends(20, 20 - d, 0, 3)] == [0, 1, 2]


def test_a_sink_entry_is_seen_for_ever_but_never_from_before_it() -> None:
    assert attends(10_000, 3, sink=4, window=2)
    assert not attends(10_000, 4, sink=4, window=2)
    assert not attends(2, 3, sink=4, window=2)


@pytest.mark.parametrize(("window", "includes"), [(0, True), (-1, False)])
def test_an_empty_ring_is_refused(window: int, includes: bool) -> None:
    with pytest.raises(ValueError, match=f"window {window}"):
        ring_capacity(window, includes)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks(block_size: int) -> None:
    for sink in range(40):
        for ring in range(1, 40):
            blocks = slot_blocks(sink, ring, block_size)
            assert (blocks - 1) * block_size < sink + ring <= blocks * block_size
            shared = immutable_blocks(sink, block_size)
            changing = {compact_index(p, sink, ring) for p in range(sink, sink + 3 * ring)}
            assert all(entry // block_size >= shared for entry in changing)
            assert any(entry // block_size == shared for entry in range(sink, sink + ring))
