"""Rotary positions against their definition, and a whole step's turning against a simulation.

The simulation stores, for every cache slot, which stream position it holds and by how much its key
is rotated, in plain integers. Attention is right when every query that turns by `v(p)` finds the
ring's key of position `q` rotated by `v(p) - (p - q)`, and the sink's by its own position.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from vllm_bounded_kv.engine import ranged, rebase
from vllm_bounded_kv.engine.plan import EnginePlan, plan_step
from vllm_bounded_kv.engine.policy import EnginePolicy
from vllm_bounded_kv.engine.rotary import Rotary
from vllm_bounded_kv.positions import next_fallback, num_fallbacks, rotary_position


def test_positions_fall_back_by_the_period_each_time() -> None:
    limit, capacity = 10, 6
    turned = [rotary_position(p, capacity, limit) for p in range(20)]
    assert turned == [*range(10), 6, 7, 8, 9, 6, 7, 8, 9, 6, 7]


@pytest.mark.parametrize(("capacity", "limit"), [(1, 2), (5, 6), (7, 28), (100, 101), (3, 50)])
def test_positions_stay_below_the_limit_and_fall_only_at_boundaries(
    capacity: int, limit: int
) -> None:
    period = limit - capacity
    boundaries = range(limit, 7 * limit, period)
    before = -1
    for p in range(5 * limit):
        v = rotary_position(p, capacity, limit)
        assert 0 <= v < limit
        falls = p >= limit and (p - capacity) % period == 0
        assert v == before + 1 - period * falls
        assert v == p - period * num_fallbacks(p, capacity, limit)
        falls_next = next(q for q in range(p, p + limit + 1) if q in boundaries)
        assert next_fallback(p, capacity, limit) == falls_next
        before = v


def test_the_vectorised_twin_says_the_same() -> None:
    limit = 40
    position = np.arange(300)
    for capacity in (1, 17, 39):
        expected = [num_fallbacks(p, capacity, limit) for p in range(300)]
        capacities = np.full(300, capacity)
        assert rebase.num_fallbacks(position, capacities, limit).tolist() == expected


# --- a simulated cache


class Counting(Rotary):
    """A rotary embedding that tells by how much it was asked to turn, and turns nothing."""

    def __init__(self) -> None:
        super().__init__(np.zeros(1), True)

    def rotation(self, by: Any) -> Any:
        return by.tolist()


@dataclass
class Stream:
    sink: int
    ring: int
    blocks: list[int]
    length: int = 0

    @property
    def capacity(self) -> int:
        return self.sink + self.ring


def wanted_keys(sink: int, ring: int, p: int, v: int) -> dict[int, int]:
    """What a query at `p` that turns by `v` must find: the rotation of each key by its position."""
    near = {q: v - (p - q) for q in range(max(sink, p - ring + 1), p + 1)}
    return near | {q: q for q in range(min(sink, p + 1))}


@dataclass
class World:
    """Streams over one cache of `(position, rotation)` by slot."""

    block_size: int
    limit: int
    streams: list[Stream]
    spare: int = 0
    cache: dict[int, tuple[int, int]] = field(default_factory=dict)

    def step(self, num_tokens: list[int], num_rejected: list[int] | None = None) -> None:
        """Of each stream's tokens, the last so many are drafts that are taken back."""
        width = max(len(s.blocks) for s in self.streams)
        table = np.zeros((len(self.streams), 2 + width), dtype=np.int32)
        for row, s in enumerate(self.streams):
            table[row, : 2 + len(s.blocks)] = [s.sink, s.ring, *s.blocks]
        after = [s.length + n for s, n in zip(self.streams, num_tokens, strict=True)]
        start = np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int32)
        plan = plan_step(
            table,
            start,
            np.array(after, np.int32),
            int(start[-1]),
            self.block_size,
            self.limit,
            self.spare,
        )
        positions = [
            p for s, end in zip(self.streams, after, strict=True) for p in range(s.length, end)
        ]
        owners = [s for s, n in zip(self.streams, num_tokens, strict=True) for _ in range(n)]
        turned = positions if plan.rebase is None else plan.rebase.positions.tolist()
        expected = [
            rotary_position(p, s.capacity, self.limit)
            for p, s in zip(positions, owners, strict=True)
        ]
        assert turned == expected
        self._play(plan, positions, turned, start)
        rejected = num_rejected or [0] * len(after)
        for s, end, minus in zip(self.streams, after, rejected, strict=True):
            s.length = end - minus

    def _play(self, plan: EnginePlan, positions: list[int], turned: list[int], start: Any) -> None:
        moves = plan.rebase
        if moves is not None and moves.first is not None:
            self._turn(moves.first)
        for token, slot in enumerate(plan.slot_mapping.tolist()):
            if slot >= 0:
                self.cache[slot] = positions[token], turned[token]
        for row in np.flatnonzero(plan.stock_rows):
            tokens = range(start[row], start[row + 1])
            for token in tokens:
                self._check_stock(self.streams[row], positions[token], turned[token])
        for planned in plan.ranged:
            self._check_ranged(planned, turned)
        for token, slot in zip(plan.late_tokens.tolist(), plan.late_slots.tolist(), strict=True):
            self.cache[slot] = positions[token], turned[token]
        if moves is not None and moves.last is not None:
            self._turn(moves.last)

    def _turn(self, turn: rebase.Turn) -> None:
        slots = turn.slots.tolist()
        assert len(set(slots)) == len(slots), "a key is turned twice"
        for slot, by in zip(slots, turn.by.tolist(), strict=True):
            assert by < 0
            if slot in self.cache or not self.spare:  # spare entries may be blank still
                position, rotation = self.cache[slot]
                self.cache[slot] = position, rotation + by

    def _check_stock(self, stream: Stream, p: int, v: int) -> None:
        assert not self.spare or p < stream.capacity, "vLLM's kernel would see spare entries"
        for q, expected in wanted_keys(stream.sink, stream.ring, p, v).items():
            compact = q if q < stream.capacity else stream.sink + (q - stream.sink) % stream.ring
            slot = stream.blocks[compact // self.block_size] * self.block_size
            slot += compact % self.block_size
            assert self.cache[slot] == (q, expected), (p, q)

    def _check_ranged(self, row: Any, turned: list[int]) -> None:
        own = row.positions[len(row.slots) :].tolist()
        stored = [self.cache[slot] for slot in row.slots.tolist()]
        keys = [*stored, *zip(own, turned[row.tokens], strict=True)]
        assert [q for q, _ in keys] == row.positions.tolist()
        prepared = ranged.prepare(row, 1, torch.float32, Counting())
        queries = list(zip(own, turned[row.tokens], strict=True))
        covered = []
        for tile in prepared.tiles:
            window = keys[tile.window]
            turn: Any = tile.turn or [0] * len(window)
            seen = [
                *keys[: tile.sink],
                *((q, r + by) for (q, r), by in zip(window, turn, strict=True)),
            ]
            for index, (p, v) in enumerate(queries[tile.queries]):
                covered.append(p)
                allowed = {q: r for (q, r), m in zip(seen, tile.mask[index], strict=True) if m == 0}
                assert allowed == wanted_keys(row.sink, row.ring, p, v), p
        assert covered == own


def world(chance: random.Random, spare: int = 0) -> World:
    block_size = chance.choice([1, 2, 4])
    streams, block = [], 1
    for _ in range(chance.randint(1, 3)):
        sink, ring = chance.randint(0, 6), chance.randint(1, 9)
        count = -(-(sink + ring + spare) // block_size)
        blocks = list(range(block, block + count))
        chance.shuffle(blocks)
        streams.append(Stream(sink, ring, blocks))
        block += count
    limit = max(s.capacity for s in streams) + chance.choice([1, 2, 3, 7, 20])
    return World(block_size, limit, streams, spare)


@pytest.mark.parametrize("seed", range(150))
def test_every_query_finds_every_key_turned_right(seed: int) -> None:
    chance = random.Random(seed)
    it = world(chance)
    longest = chance.choice([1, 2, 5, 40])
    for _ in range(60):
        tokens = [chance.choice([0, 1, 1, chance.randint(1, longest)]) for _ in it.streams]
        if any(tokens):
            it.step(tokens)


@pytest.mark.parametrize("seed", range(150))
def test_rejected_drafts_harm_no_later_query(seed: int) -> None:
    """Cut where positions fall back, as the scheduler cuts them; any number of a draft's tokens
    is taken back, again and again."""
    chance = random.Random(seed)
    num_drafts = chance.randint(1, 5)
    it = world(chance, EnginePolicy(num_draft_tokens=num_drafts).spare)
    for _ in range(120):
        tokens, rejected = [], []
        for s in it.streams:
            if chance.random() < 0.1:  # a part of a prompt
                tokens.append(chance.randint(0, 12))
                rejected.append(0)
                continue
            room = next_fallback(s.length + 1, s.capacity, it.limit) - (s.length + 1)
            draft = min(room, chance.randint(0, num_drafts))
            tokens.append(1 + draft)
            rejected.append(chance.choice([0, draft, chance.randint(0, draft)]))
        if any(tokens):
            it.step(tokens, rejected)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("wrong", ["too little spare", "across a boundary"])
def test_control_rejected_drafts_do_harm(seed: int, wrong: str) -> None:
    chance = random.Random(seed)
    it = World(2, 20, [Stream(3, 6, list(range(6)))], spare=2)
    draft = 4 if wrong == "too little spare" else 3
    with pytest.raises(AssertionError):
        for _ in range(200):
            (s,) = it.streams
            room = next_fallback(s.length + 1, s.capacity, it.limit) - (s.length + 1)
            taken = draft if wrong == "across a boundary" else min(draft, room)
            it.step([1 + taken], [chance.randint(0, taken)])


def test_long_tiles_are_cut_at_boundaries_too() -> None:
    it = World(4, 200, [Stream(5, 50, list(range(14)))])
    for tokens in (700, 1, 3, 900):
        it.step([tokens])


def test_a_key_is_turned_once_a_period_where_the_period_is_no_shorter_than_the_ring() -> None:
    ring, limit = 8, 20
    it = World(4, limit, [Stream(2, ring, [0, 1, 2])])
    count: dict[int, int] = {}
    turn = it._turn

    def counted(what: rebase.Turn) -> None:
        for slot in what.slots.tolist():
            position = it.cache[slot][0]
            count[position] = count.get(position, 0) + 1
        turn(what)

    it._turn = counted  # type: ignore[method-assign]
    for _ in range(100):
        it.step([1])
    assert set(count.values()) == {1}
    boundaries = [p for p in range(limit, 100) if (p - 10) % 10 == 0]
    assert sorted(count) == [p for b in boundaries for p in range(b - ring, b)]


# --- turning itself


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 6])
def test_turning_is_rotating_less(is_neox: bool, rotary_dim: int) -> None:
    """A key rotated to 900 and turned by -600 is the key rotated to 300, in float32."""
    frequencies = 1.0 / 10000 ** (np.arange(rotary_dim // 2) / (rotary_dim // 2))
    rotary = Rotary(frequencies, is_neox)
    keys = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    far = rotary.rotation(np.full(5, 900))(keys)
    near = rotary.rotation(np.full(5, 300))(keys)
    assert not torch.allclose(far, near, atol=0.1)
    torch.testing.assert_close(rotary.rotation(np.full(5, -600))(far), near, atol=2e-6, rtol=0)
    assert torch.equal(far[..., rotary_dim:], keys[..., rotary_dim:])
