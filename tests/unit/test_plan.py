"""A step's plan against the pure ints, played on a cache that is a dict from slot to entry.

The play follows the documented order (clear, early writes, attention's reads, late writes) and
looks every read up. An entry is `(stream, position)`, so another stream's is never mistaken for
one's own, and what is not in the dict was never written, or was cleared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_bounded_kv.engine.header import HEADER_LEN, RING, SINK
from vllm_bounded_kv.engine.plan import NO_SLOT, EnginePlan, plan_step
from vllm_bounded_kv.layout import (
    attends,
    compact_index,
    immutable_blocks,
    num_valid,
    position_at_entry,
    slot_blocks,
)

CASES = 6_000
Entry = tuple[int, int]
Cache = dict[int, Entry]


@dataclass
class Row:
    """One row of a batch. `ring` 0: a padding row of zeros."""

    sink: int = 0
    ring: int = 0
    before: int = 0
    num_tokens: int = 0
    shares: bool = False
    """Hits the immutable blocks of the row before it, where that has any for it."""
    blocks: list[int] = field(default_factory=list)
    num_shared: int = 0

    @property
    def after(self) -> int:
        return self.before + self.num_tokens


@dataclass
class Batch:
    """A step: its rows, with blocks dealt out in random order."""

    rows: list[Row]
    block_size: int
    num_padded_tokens: int
    seed: int
    spare: int = 0
    """Entries of every ring that queries do not see."""

    def __post_init__(self) -> None:
        size = self.block_size
        needed = sum(slot_blocks(row.sink, row.ring + self.spare, size) for row in self.rows)
        deck = list(range(1, needed + 4))
        random.Random(self.seed).shuffle(deck)
        for index, row in enumerate(self.rows):
            if row.ring == 0:
                continue
            count = slot_blocks(row.sink, row.ring + self.spare, size)
            row.blocks = [deck.pop() for _ in range(count)]
            if index and row.shares:
                self._share(self.rows[index - 1], row)
        self.width = max((len(row.blocks) for row in self.rows), default=0) + 1

    def _share(self, owner: Row, row: Row) -> None:
        """Both begin with the same prefix: full blocks in both sinks that the owner has filled by
        the end of this step, and that `row` need not compute."""
        size = self.block_size
        in_sinks = min(immutable_blocks(owner.sink, size), immutable_blocks(row.sink, size))
        row.num_shared = min(in_sinks, owner.after // size, row.before // size)
        row.blocks[: row.num_shared] = owner.blocks[: row.num_shared]

    def entry(self, index: int, position: int) -> Entry:
        """What a row's cache holds for a position: a shared block holds its owner's entry."""
        row = self.rows[index]
        if position < row.num_shared * self.block_size:
            return self.entry(index - 1, position)
        return index, position

    def slot(self, index: int, position: int) -> int:
        row = self.rows[index]
        compact = compact_index(position, row.sink, row.ring + self.spare)
        return row.blocks[compact // self.block_size] * self.block_size + (
            compact % self.block_size
        )

    def cache(self, after: bool) -> Cache:
        """What the valid entries of all rows hold before or after the step, by the reference."""
        cache: Cache = {}
        for index, row in enumerate(self.rows):
            if row.ring == 0:
                continue
            count = row.after if after else row.before
            for compact in range(num_valid(count, row.sink, row.ring + self.spare)):
                position = position_at_entry(compact, count, row.sink, row.ring + self.spare)
                entry = self.entry(index, position)
                if after or entry[1] < self.rows[entry[0]].before:
                    cache[self.slot(index, position)] = entry
        return cache

    def plan(self) -> EnginePlan:
        table = np.zeros((len(self.rows), HEADER_LEN + self.width), dtype=np.int32)
        for index, row in enumerate(self.rows):
            table[index, SINK], table[index, RING] = row.sink, row.ring
            table[index, HEADER_LEN : HEADER_LEN + len(row.blocks)] = row.blocks
        counts = [row.num_tokens for row in self.rows]
        return plan_step(
            table,
            np.cumsum([0, *counts], dtype=np.int32),
            np.array([row.after for row in self.rows], dtype=np.int32),
            sum(counts) + self.num_padded_tokens,
            self.block_size,
            spare=self.spare,
        )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    block_size = draw(st.sampled_from([1, 2, 4]))
    count = draw(st.integers(1, 4))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(count):
        if rng.random() < 0.1:
            rows.append(Row())
            continue
        sink = rng.choice([0, 1, 4, rng.randint(0, 10)])
        ring = rng.choice([1, 2, rng.randint(1, 9)])
        capacity = sink + ring
        border = rng.choice([0, sink, capacity, rng.randint(0, 4 * capacity)])
        before = max(0, border + rng.randint(-1, 1))
        tokens = rng.choice([1, 1, 2, rng.randint(1, 12), rng.randint(1, 4 * capacity)])
        rows.append(Row(sink, ring, before, tokens, rng.random() < 0.5))
    padded, spare = rng.choice([0, 0, 3]), rng.choice([0, 0, 1, 4])
    return Batch(rows, block_size, padded, rng.randrange(2**32), spare)


def play_writes_before_attention(batch: Batch, plan: EnginePlan, cache: Cache) -> None:
    size = batch.block_size
    for block in plan.new_partial_blocks:
        for offset in range(size):
            cache.pop(int(block) * size + offset, None)
    tokens = token_entries(batch)
    written: set[int] = set()
    for token, slot in enumerate(plan.slot_mapping.tolist()):
        if slot == NO_SLOT:
            continue
        assert token < len(tokens), "a padded token writes"
        assert slot not in written, "two early writes to one slot"
        written.add(slot)
        cache[slot] = tokens[token]


def play_writes_after_attention(batch: Batch, plan: EnginePlan, cache: Cache) -> None:
    tokens = token_entries(batch)
    late_slots = plan.late_slots.tolist()
    assert len(set(late_slots)) == len(late_slots), "two late writes to one slot"
    for token, slot in zip(plan.late_tokens.tolist(), late_slots, strict=True):
        assert plan.slot_mapping[token] == NO_SLOT, "a token written twice"
        cache[slot] = tokens[token]


def token_entries(batch: Batch) -> list[Entry]:
    return [
        (index, position)
        for index, row in enumerate(batch.rows)
        for position in range(row.before, row.after)
    ]


def expected_keys(batch: Batch, index: int, query: int) -> list[Entry]:
    row = batch.rows[index]
    keys = (k for k in range(query + 1) if attends(query, k, row.sink, row.ring))
    return sorted(batch.entry(index, key) for key in keys)


def check_stock_row(batch: Batch, plan: EnginePlan, cache: Cache, index: int) -> None:
    """vLLM's kernel: query `j` sees a prefix of the compact row that ends at its own entry."""
    row, size = batch.rows[index], batch.block_size
    length = int(plan.seq_lens[index])
    for j, query in enumerate(range(row.before, row.after)):
        seen = [
            cache[row.blocks[c // size] * size + c % size]
            for c in range(length - row.num_tokens + j + 1)
        ]
        assert sorted(seen) == expected_keys(batch, index, query)


def check_ranged_row(batch: Batch, plan: EnginePlan, cache: Cache, index: int, number: int) -> None:
    row, ranged = batch.rows[index], plan.ranged[number]
    first = sum(r.num_tokens for r in batch.rows[:index])
    assert ranged.tokens == slice(first, first + row.num_tokens)
    assert (ranged.sink, ranged.ring) == (row.sink, row.ring)
    positions = ranged.positions.tolist()
    assert positions == sorted(set(positions))
    assert positions[len(ranged.slots) :] == list(range(row.before, row.after))
    read = [cache[slot] for slot in ranged.slots.tolist()]
    assert read == [batch.entry(index, p) for p in positions[: len(read)]]
    entries = [*read, *((index, p) for p in range(row.before, row.after))]
    for query in range(row.before, row.after):
        seen = [
            entry
            for entry, key in zip(entries, positions, strict=True)
            if query - key >= 0 and (query - key < row.ring or key < row.sink)
        ]
        assert sorted(seen) == expected_keys(batch, index, query)


def filled(count: int, block: int, size: int) -> int:
    return min(max(count - block * size, 0), size)


def expected_new_partial_blocks(batch: Batch) -> list[int]:
    size = batch.block_size
    return sorted(
        block
        for row in batch.rows
        for number, block in enumerate(row.blocks)
        if 0 < filled(num_valid(row.after, row.sink, row.ring), number, size) < size
        and filled(num_valid(row.before, row.sink, row.ring), number, size) == 0
    )


@settings(max_examples=CASES, deadline=None, derandomize=True, database=None)
@given(batches())
def test_every_query_sees_its_keys_and_the_cache_ends_as_the_reference_says(batch: Batch) -> None:
    plan = batch.plan()
    cache = batch.cache(after=False)
    play_writes_before_attention(batch, plan, cache)
    number = 0
    for index, row in enumerate(batch.rows):
        wraps = row.after > row.sink + row.ring > 0 < row.ring
        wraps = wraps and row.num_tokens > (0 if batch.spare else 1)
        assert bool(plan.stock_rows[index]) is not wraps
        if wraps:
            check_ranged_row(batch, plan, cache, index, number)
            number += 1
        else:
            check_stock_row(batch, plan, cache, index)
    assert number == len(plan.ranged)
    play_writes_after_attention(batch, plan, cache)
    assert cache == batch.cache(after=True)
    assert sorted(plan.new_partial_blocks.tolist()) == expected_new_partial_blocks(batch)
    for index, row in enumerate(batch.rows):
        valid = num_valid(row.after, row.sink, row.ring) if row.ring else 0
        assert plan.seq_lens[index] == valid


def test_a_batch_of_padding_does_nothing() -> None:
    plan = Batch([Row(), Row()], 4, 5, 0).plan()
    assert plan.slot_mapping.tolist() == [NO_SLOT] * 5
    assert plan.seq_lens.tolist() == [0, 0]
    assert plan.stock_rows.all()
    assert not plan.ranged
    assert len(plan.late_tokens) == len(plan.late_slots) == len(plan.new_partial_blocks) == 0


def test_the_dtypes_are_what_the_kernels_take() -> None:
    plan = Batch([Row(2, 3, 4, 1), Row(2, 3, 4, 9)], 4, 0, 0).plan()
    assert plan.seq_lens.dtype == np.int32
    for array in (plan.slot_mapping, plan.late_tokens, plan.late_slots, plan.new_partial_blocks):
        assert array.dtype == np.int64
