"""The device's plan against the host's, which `test_plan` and `test_positions` judge."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.paged_batch import Batch, a_batch
from vllm_bounded_kv.attention.paged import BEFORE, FIRST, LENGTH, LIMIT, NO_LIMIT, RING, SINK
from vllm_bounded_kv.attention.paged_plan import PagedPlan, plan_paged
from vllm_bounded_kv.engine.plan import EnginePlan, plan_step

CASES = 1_000


def both(batch: Batch) -> tuple[PagedPlan, EnginePlan]:
    ints = batch.ints()
    device = plan_paged(
        **ints,
        num_tokens=batch.num_tokens,
        block_size=batch.block_size,
        position_limit=batch.limit,
    )
    header = torch.stack([ints["sink"], ints["ring"]], dim=1)
    host = plan_step(
        torch.cat([header, ints["block_table"]], dim=1).numpy(),
        ints["query_start"].numpy(),
        ints["stream_lens"].numpy(),
        batch.num_tokens,
        batch.block_size,
        batch.limit,
    )
    return device, host


@settings(max_examples=CASES, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32 - 1))
def test_equals_the_hosts_plan(seed: int) -> None:
    batch = a_batch(seed)
    device, host = both(batch)
    late = np.full(batch.num_tokens, -1)
    late[host.late_tokens] = host.late_slots
    assert device.slots.tolist() == host.slot_mapping.tolist()
    assert device.late_slots.tolist() == late.tolist()
    assert device.seq_lens.tolist() == host.seq_lens.tolist()
    if host.rebase is not None:
        real = len(host.rebase.positions)
        assert device.positions[:real].tolist() == host.rebase.positions.tolist()
    else:
        own = [p for s in batch.streams for p in range(s.before, s.after)]
        assert device.positions[: len(own)].tolist() == own


def test_rows_of_one_token_are_a_short_sequence_to_a_stock_kernel() -> None:
    """A sink of 2 and a ring of 3 in blocks of 4; entry 6 is at 2 + (6 - 2) mod 3 = 3."""
    plan = plan_paged(
        sink=torch.tensor([2, 2], dtype=torch.int32),
        ring=torch.tensor([3, 3], dtype=torch.int32),
        block_table=torch.tensor([[7, 9], [4, 5]], dtype=torch.int32),
        query_start=torch.tensor([0, 1, 2], dtype=torch.int32),
        stream_lens=torch.tensor([7, 2], dtype=torch.int32),
        num_tokens=3,
        block_size=4,
    )
    assert plan.slots.tolist() == [7 * 4 + 3, 4 * 4 + 1, -1]
    assert plan.late_slots.tolist() == [-1, -1, -1]
    assert plan.seq_lens.tolist() == [5, 2]
    assert plan.positions.tolist() == [6, 1, 0]
    assert plan.table[:, [FIRST, LENGTH, BEFORE]].tolist() == [[0, 1, 6], [1, 1, 1]]
    assert plan.table[:, [SINK, RING, LIMIT]].tolist() == [[2, 3, NO_LIMIT]] * 2


def test_padding_with_tokens_writes_nothing() -> None:
    """Warm-up and captured graphs run rows of zeros that have tokens."""
    zeros = torch.zeros(2, dtype=torch.int32)
    plan = plan_paged(
        sink=zeros,
        ring=zeros,
        block_table=torch.zeros(2, 1, dtype=torch.int32),
        query_start=torch.tensor([0, 40, 41], dtype=torch.int32),
        stream_lens=torch.tensor([40, 1], dtype=torch.int32),
        num_tokens=41,
        block_size=4,
        position_limit=16,
    )
    assert plan.slots.tolist() == plan.late_slots.tolist() == [-1] * 41
    assert plan.table[:, LENGTH].tolist() == [0, 0]


def test_nothing_asks_what_the_device_holds() -> None:
    """On meta tensors, which hold nothing, any wait for a value is an error."""
    batch = a_batch(5, rebases=True)
    ints = {name: x.to("meta") for name, x in batch.ints().items()}
    plan = plan_paged(
        **ints, num_tokens=batch.num_tokens, block_size=batch.block_size, position_limit=100
    )
    assert plan.slots.shape == (batch.num_tokens,)
    assert plan.table.shape == (len(batch.streams), 6)
