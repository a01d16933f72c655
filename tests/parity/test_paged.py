"""The paged kernels, reference and Triton, against plain float64 over all that was ever written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.paged_batch import Batch, Stream, a_batch
from vllm_bounded_kv.attention import paged_reference, triton_paged, triton_paged_cache
from vllm_bounded_kv.attention.paged import NO_SLOT, Turns
from vllm_bounded_kv.attention.paged_plan import PagedPlan, plan_paged
from vllm_bounded_kv.attention.triton_paged import Tiling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = {"reference": 60, "triton": 300}
SCALE = 0.3
ATTENTION = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""Absolute, for unit-normal inputs: keys, queries and weights are rounded to the dtype."""
TURNED = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Absolute, for unit-normal keys: two roundings, when written and when turned."""


def small_tiles(*args: Any, **kwargs: Any) -> Any:
    return triton_paged.attend(*args, **kwargs, tiling=Tiling(16, 32))


ATTEND = {"reference": paged_reference.attend, "triton": small_tiles}
CACHE: dict[str, Any] = {"reference": paged_reference, "triton": triton_paged_cache}
kinds = pytest.mark.parametrize("kind", list(CASES))


def for_cases(kind: str, check: Any, **options: Any) -> None:
    """Hypothesis, with as many cases as the kind is worth."""

    @settings(max_examples=CASES[kind], deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**32 - 1))
    def run(seed: int) -> None:
        check(kind, a_batch(seed, **options))

    run()


def planned(batch: Batch) -> PagedPlan:
    ints = {name: x.to(DEVICE) for name, x in batch.ints().items()}
    return plan_paged(
        **ints,
        num_tokens=batch.num_tokens,
        block_size=batch.block_size,
        position_limit=batch.limit,
    )


def turns_of(batch: Batch) -> Turns | None:
    if batch.limit is None:
        return None
    return Turns.of(batch.frequencies.numpy(), batch.is_neox, DEVICE)


def blocks_of(batch: Batch) -> torch.Tensor:
    return batch.ints()["block_table"].to(DEVICE)


def on_device(cache: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The views of a cache, strides kept."""
    keys, values = cache
    if DEVICE.type == "cpu":
        return keys, values
    whole = torch.cat([keys, values], -1).to(DEVICE)
    return whole[..., : keys.shape[-1]], whole[..., keys.shape[-1] :]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def check_attention(kind: str, batch: Batch) -> None:
    keys, values = on_device(batch.cache_before(is_turned=True))
    out = torch.full_like(batch.query, 7.0).to(DEVICE)
    result = ATTEND[kind](
        batch.query.to(DEVICE),
        batch.own("keys").to(DEVICE),
        batch.own("values").to(DEVICE),
        keys,
        values,
        planned(batch).table,
        blocks_of(batch),
        SCALE,
        turns_of(batch),
        out=out,
    )
    assert result is out
    real = batch.num_tokens - batch.num_padded
    error = (out[:real].cpu().double() - batch.attention(SCALE)).abs()
    assert real == 0 or float(error.max()) < ATTENTION[batch.dtype]
    assert bool((out[real:] == 7.0).all())


@kinds
def test_every_query_attends_what_the_definition_says(kind: str) -> None:
    for_cases(kind, check_attention)


def check_stores(kind: str, batch: Batch) -> None:
    keys, values = on_device(batch.cache_before(is_turned=True))
    plan = planned(batch)
    expected_keys, expected_values = (x.cpu().clone() for x in (keys, values))
    own = batch.own("keys").to(DEVICE), batch.own("values").to(DEVICE)

    CACHE[kind].store(*own, keys, values, plan.slots)
    for s in batch.streams:
        for p in range(s.before, s.after):
            # What the step's reads may need now: the sink is there, nothing is destroyed.
            if p < s.sink + s.ring or s.length == 1:
                expected_keys[batch.place(s, p)] = s.keys[p]
                expected_values[batch.place(s, p)] = s.values[p]
    assert torch.equal(bits(keys), bits(expected_keys))
    assert torch.equal(bits(values), bits(expected_values))

    CACHE[kind].store(*own, keys, values, plan.late_slots)
    for s in batch.streams:
        for p in s.held(s.after):
            if p >= s.before:
                expected_keys[batch.place(s, p)] = s.keys[p]
                expected_values[batch.place(s, p)] = s.values[p]
    assert torch.equal(bits(keys), bits(expected_keys))
    assert torch.equal(bits(values), bits(expected_values))
    late = plan.late_slots[plan.late_slots != NO_SLOT]
    assert len(late.unique()) == len(late), "an entry has two writers"


@kinds
def test_stores_are_bit_exact_and_touch_nothing_else(kind: str) -> None:
    for_cases(kind, check_stores)


def check_turns(kind: str, batch: Batch) -> None:
    keys, values = on_device(batch.cache_before(is_turned=False))
    plan, turns = planned(batch), turns_of(batch)
    assert turns is not None
    kept = bits(values)

    def check(before: torch.Tensor, expected: torch.Tensor, turned: set[tuple[int, int]]) -> None:
        now = keys.cpu()
        error = (now.double() - expected.double()).abs().nan_to_num(0.0)
        assert float(error.max()) < TURNED[batch.dtype]
        assert torch.equal(now.isnan(), expected.isnan())
        same = torch.ones(now.shape[:2], dtype=torch.bool)
        for place in turned:
            same[place] = False
        assert torch.equal(bits(now[same]), bits(before[same])), "a key turned out of turn"
        assert torch.equal(
            bits(now[..., batch.rotary_dim :]), bits(before[..., batch.rotary_dim :])
        )
        assert torch.equal(bits(values), kept)

    was = keys.cpu().clone()
    CACHE[kind].turn_first(keys, plan.table, blocks_of(batch), turns)
    begin = {
        batch.place(s, p)
        for s in batch.streams
        if s.length and s.before and falls(s, s.before - 1, s.before, batch.limit)
        for p in s.held(s.before)[min(s.sink, s.before) :]
    }
    check(was, batch.cache_before(is_turned=True)[0], begin)

    # What the late stores leave, then what the next step must find.
    was, expected = batch.cache_before(is_turned=True)[0], batch.empty_cache()[0]
    crossed = set()
    for s in batch.streams:
        batch.put(s, expected, torch.empty_like(expected), s.after, s.after - 1)
        for p in s.held(s.after):
            if p >= s.before:
                was[batch.place(s, p)] = s.keys[p]
            if s.length and p >= s.sink and falls(s, max(p, s.before), s.after - 1, batch.limit):
                crossed.add(batch.place(s, p))
    keys.copy_(was)
    CACHE[kind].turn_last(keys, plan.table, blocks_of(batch), turns)
    check(was, expected, crossed)


def falls(s: Stream, p: int, q: int, limit: int | None) -> bool:
    """Whether `v` falls back between the two."""
    return s.rotary(q, limit) - s.rotary(p, limit) != q - p


@kinds
def test_keys_turn_once_and_by_the_right_angle(kind: str) -> None:
    for_cases(kind, check_turns, rebases=True)


def step(kind: str, batch: Batch, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One layer's step, in the documented order; `[N, H, D]`."""
    plan, turns, blocks = planned(batch), turns_of(batch), blocks_of(batch)
    own = batch.own("keys").to(DEVICE), batch.own("values").to(DEVICE)
    cache = CACHE[kind]
    if turns is not None:
        cache.turn_first(keys, plan.table, blocks, turns)
    cache.store(*own, keys, values, plan.slots)
    query = batch.query.to(DEVICE)
    out = ATTEND[kind](query, *own, keys, values, plan.table, blocks, SCALE, turns)
    cache.store(*own, keys, values, plan.late_slots)
    if turns is not None:
        cache.turn_last(keys, plan.table, blocks, turns)
    assert isinstance(out, torch.Tensor)
    return out


@kinds
@pytest.mark.parametrize("rebases", [False, True])
def test_a_stream_of_many_steps_stays_exact(kind: str, rebases: bool) -> None:
    """Wraps, chunks that wrap several times, and boundaries, on one cache that starts as NaN."""
    sink, ring, before = 5, 7, 0
    limit = 20 if rebases else None
    keys, values = torch.empty(0), torch.empty(0)
    generator = torch.Generator().manual_seed(0)
    history = torch.randn(2, 200, 1, 16, generator=generator)
    for length in (3, 1, 8, 1, 1, 30, 1, 2, 9, 1, 45, 1, 1):
        after = before + length
        query = torch.randn(length, 2, 16, generator=generator)
        stream = Stream(sink, ring, before, length, [3, 1, 2], *history[:, :after])
        batch = Batch([stream], 4, 5, 0, 1, 2, 16, torch.float32, False, limit, 16, True, query)
        if before == 0:
            keys, values = on_device(batch.empty_cache())
        error = step(kind, batch, keys, values).cpu().double() - batch.attention(SCALE)
        assert float(error.abs().max()) < 3e-5
        before = after


@kinds
def test_a_source_written_in_this_step_can_be_read_in_it(kind: str) -> None:
    """vLLM hashes a block when it schedules the step that fills it. So a request may share, in the
    same step, a block of the sink that another, which wraps, is only now writing."""
    history = torch.randn(2, 60, 1, 16, generator=torch.Generator().manual_seed(0))
    writer = Stream(8, 4, 0, 40, [1, 2, 3], *history[:, :40])
    reader_history = torch.cat([history[:, :8], history[:, 43:]], dim=1)[:, :11]
    reader = Stream(8, 4, 8, 3, [1, 2, 4], *reader_history)
    for streams in ([writer, reader], [reader, writer]):
        query = torch.randn(43, 1, 16, generator=torch.Generator().manual_seed(1))
        batch = Batch(streams, 4, 6, 0, 1, 1, 16, torch.float32, False, None, 16, True, query)
        keys, values = on_device(batch.empty_cache())
        error = step(kind, batch, keys, values).cpu().double() - batch.attention(SCALE)
        assert float(error.abs().max()) < ATTENTION[torch.float32]


def test_heads_may_lie_far_apart() -> None:
    """As in a layout that keeps each head's blocks together: beyond what 32 bits count."""
    stride = 2**30
    size, shape = 2 * 4 * 32, (2, 4, 3, 32)
    memory = torch.empty(
        2 * stride + size, dtype=torch.float16, device=DEVICE
    )  # pages come as needed
    keys = memory.as_strided(shape, (128, 32, stride, 1))
    values = torch.randn(shape, device=DEVICE).half()
    k = torch.randn(3, 3, 32, device=DEVICE).half()
    slots = torch.tensor([4, 5, 6], device=DEVICE)
    triton_paged_cache.store(k, k, keys, values, slots)
    assert torch.equal(keys[1, :3], k)
    table = torch.tensor([[0, 1, 3, 0, 8, 20]], dtype=torch.int32, device=DEVICE)
    blocks = torch.tensor([[1, 0]], dtype=torch.int32, device=DEVICE)
    out = triton_paged.attend(k[:1], k[:1], k[:1], keys, values, table, blocks, 1.0)
    near = triton_paged.attend(k[:1], k[:1], k[:1], keys.clone(), values, table, blocks, 1.0)
    assert torch.equal(out, near)
    turns = Turns.of(torch.ones(16).double().numpy(), True, DEVICE)
    table = torch.tensor([[0, 1, 20, 0, 8, 20]], dtype=torch.int32, device=DEVICE)
    before = keys.clone()
    triton_paged_cache.turn_first(keys, table, blocks, turns)
    triton_paged_cache.turn_first(before, table, blocks, turns)
    assert torch.equal(keys[1, :3], before[1, :3])
