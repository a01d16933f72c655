"""A step's plan, computed where the batch is: the twin of `engine.plan` in torch, on any device.

vLLM's V2 model runner keeps block rows, query starts and lengths on the device, and does not wait
for them. So this does not either: no value decides a shape or a branch. What `engine.plan` lists
(late tokens, rows to turn) is here a mapping over all tokens or a table over all rows, in which
`NO_SLOT` or zeros stand for nothing. Invariant: equal to `engine.plan.plan_step` where both speak.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_bounded_kv.attention.paged import NO_LIMIT, NO_SLOT


@dataclass(frozen=True)
class PagedPlan:
    """One step of a batch of `B` rows and `N` tokens."""

    table: Tensor
    """`[B, COLUMNS]` int32: what the paged kernels read of each row."""
    seq_lens: Tensor
    """`[B]` int32, valid compact entries after the step: for a row of one token, the sequence
    length that a stock paged kernel needs."""
    slots: Tensor
    """`[N]` int64, of tokens stored before attention: they destroy nothing that is still read."""
    late_slots: Tensor
    """`[N]` int64, of tokens stored after attention: the last writers of entries that it reads."""
    positions: Tensor
    """`[N]` int64 rotary positions; 0 for padding."""


def plan_paged(
    sink: Tensor,
    ring: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    stream_lens: Tensor,
    num_tokens: int,
    block_size: int,
    position_limit: int | None = None,
) -> PagedPlan:
    """Plan one step without waiting for the device.

    Args:
        sink, ring: `[B]`, of each row's stream; ring 0: a row of padding, which does nothing.
        block_table: `[B, max_blocks]` int32.
        query_start: `[B + 1]` first token of each row, and their end.
        stream_lens: `[B]` entries of each stream after the step.
        num_tokens: `N`, padding included.
        block_size: entries per block.
        position_limit: above every `sink + ring`; `None`: positions never fall back.
    """
    is_real = ring > 0
    start, end = query_start[:-1].long(), query_start[1:].long()
    after, sink = stream_lens.long(), sink.long()
    before = after - (end - start)
    length = torch.where(is_real, end - start, 0)
    # What does not wrap needs no special case: padding has a ring without end.
    ring = torch.where(is_real, ring.long(), NO_LIMIT)
    capacity = sink + ring
    limit = NO_LIMIT if position_limit is None else position_limit

    token = torch.arange(num_tokens, device=query_start.device)
    row = torch.searchsorted(end, token, right=True).clamp_(max=len(end) - 1)
    position = token - start[row] + before[row]
    is_token = (token < end[-1]) & is_real[row]
    compact = _compact(position, sink[row], ring[row])
    block = torch.where(is_token, compact // block_size, 0)
    slot = block_table[row, block].long() * block_size + compact % block_size
    # The rows that read what they overwrite: several tokens, and past their capacity.
    is_late = ((after > capacity) & (length > 1))[row] & (position >= capacity[row])
    is_last_writer = position >= (after - ring)[row]

    fallen = torch.where(
        position < limit, 0, (position - capacity[row]) // (limit - capacity).clamp_(min=1)[row]
    )
    rotary = position - fallen * (limit - capacity)[row]
    columns = [start, length, before, sink, torch.where(is_real, ring, 0)]
    table = torch.stack([*columns, torch.full_like(sink, limit)], dim=1)
    return PagedPlan(
        table=table.int(),
        seq_lens=torch.minimum(after, capacity).int(),
        slots=torch.where(is_token & ~is_late, slot, NO_SLOT),
        late_slots=torch.where(is_token & is_late & is_last_writer, slot, NO_SLOT),
        positions=torch.where(is_token, rotary, 0),
    )


def _compact(position: Tensor, sink: Tensor, ring: Tensor) -> Tensor:
    """`layout.compact_index`, element by element."""
    return torch.where(position < sink + ring, position, sink + (position - sink) % ring)
