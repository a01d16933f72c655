"""The store kernel alone, bit for bit, against one assignment per token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.interpreted_triton import DEVICE
from vllm_bounded_kv.attention import triton
from vllm_bounded_kv.layout import Reads, RowPlan, Write, Writes
from vllm_bounded_kv.step_plan import StepPlan

CASES = 320
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Store:
    """One launch: what is fresh, where it goes."""

    plan: tuple[RowPlan, ...]
    seed: int
    reverse: bool
    rows: int
    kv_heads: int
    num_tokens: int
    head_dim: int
    slot_tokens: int
    fresh_dtype: torch.dtype
    slot_dtype: torch.dtype

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values (halves of one tensor, so not contiguous) and slots full of NaN."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (len(self.plan) * self.rows, self.kv_heads, self.num_tokens, 2 * self.head_dim)
        kv = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(
            -6, 4, shape, generator=generator
        )
        k, v = kv.to(DEVICE, self.fresh_dtype).chunk(2, dim=-1)
        shape = (3, self.rows, self.kv_heads, self.slot_tokens, 2 * self.head_dim)
        return k, v, torch.full(shape, torch.nan, dtype=self.slot_dtype, device=DEVICE)

    def expected(self) -> Tensor:
        k, v, slots = self.tensors()
        for b, row in enumerate(self.plan):
            for offset, start, length in row.writes:
                for i in range(length):
                    token = offset - i if self.reverse else offset + i
                    for r in range(self.rows):
                        for half, fresh in enumerate((k, v)):
                            own = slots[row.slot, r, :, start + i].chunk(2, dim=-1)[half]
                            own.copy_(fresh[b * self.rows + r, :, token])
        return slots

    def stored(self) -> Tensor:
        k, v, slots = self.tensors()
        table = StepPlan.of(self.plan, DEVICE).table
        triton.store_launch(k, v, slots, table, self.reverse).run()
        return slots


@st.composite
def stores(draw: st.DrawFn) -> Store:
    num_tokens = draw(st.integers(1, 20))
    slot_tokens = draw(st.integers(1, 24))
    reverse = draw(st.booleans())

    def row(slot: int) -> RowPlan:
        writes, free = [], 0
        for _ in range(3):  # ranges of the slot that do not overlap
            start = draw(st.integers(free, slot_tokens))
            length = draw(st.integers(0, min(num_tokens, slot_tokens - start)))
            free = start + length
            offset = draw(st.integers(0, num_tokens - length))
            offset += length - 1 if reverse and length else 0
            writes.append(Write(offset, start, length) if length else Write())
        order = draw(st.permutations(writes))
        return RowPlan(slot, draw(st.integers(-1, 3)), Reads(), Writes(*order))

    slots = draw(st.permutations(range(3)))[: draw(st.integers(1, 3))]
    return Store(
        plan=tuple(row(slot) for slot in slots),
        seed=draw(st.integers(0, 2**32)),
        reverse=reverse,
        rows=draw(st.integers(1, 2)),
        kv_heads=draw(st.sampled_from([1, 1, 2])),
        num_tokens=num_tokens,
        head_dim=draw(st.sampled_from([16, 32, 80])),
        slot_tokens=slot_tokens,
        fresh_dtype=draw(st.sampled_from(FLOATS)),
        slot_dtype=draw(st.sampled_from(FLOATS)),
    )


@settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=[*HealthCheck])
@given(stores())
def test_stores_are_bit_exact(store: Store) -> None:
    assert same_bits(store.stored(), store.expected())


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def test_several_tiles_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "MAX_KEYS", 4)
    writes = Writes(Write(10, 0, 11), Write(17, 12, 5), Write(19, 18, 1))
    plan = (RowPlan(1, 0, Reads(), writes),)
    store = Store(plan, 0, True, 1, 1, 20, 16, 24, torch.float32, torch.float32)
    assert same_bits(store.stored(), store.expected())
    assert not store.stored()[1].isnan().all()


def test_control_a_wrong_order_is_seen() -> None:
    plan = (RowPlan(1, 0, Reads(), Writes(Write(2, 0, 3))),)
    up = Store(plan, 0, False, 1, 1, 5, 16, 8, torch.float32, torch.float32)
    down = Store(plan, 0, True, 1, 1, 5, 16, 8, torch.float32, torch.float32)
    assert not same_bits(up.stored(), down.expected())
