"""Attention over retained entries and a step's own tokens, then the stores: naive, in PyTorch.

`Attend` as it is defined, row by row. Scores and sums are computed in float64 when `q` is float64
and in float32 otherwise, and the result is rounded once, to `q`'s dtype.
"""

import math

import torch
from torch import Tensor

from vllm_bounded_kv.attention.checks import check
from vllm_bounded_kv.layout import RowPlan
from vllm_bounded_kv.step_plan import StepPlan


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    plan: StepPlan,
    *,
    sources: Tensor | None = None,
    row_sources: Tensor | None = None,
    query_window: int | None = None,
    reverse_step_order: bool = False,
    rel_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One layer of one step: see `Attend`."""
    check(q, k, v, slots, plan, sources, row_sources, rel_bias, out, reverse_step_order)
    rows = slots.shape[1]
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    planned = [RowPlan.from_ints(ints) for ints in plan.host.tolist()]
    for b, row in enumerate(planned):
        for r in range(rows):
            i = b * rows + r
            source = _source_of(row, b, r, sources, row_sources)
            retained = _gather(row, source, slots[row.slot, r])
            bias = None if rel_bias is None else rel_bias[i]
            out[i] = _attend_row(q[i], k[i], v[i], retained, query_window, bias)
    for b, row in enumerate(planned):
        own = slice(b * rows, (b + 1) * rows)
        _store(row, k[own], v[own], slots[row.slot], reverse_step_order)
    return out


def _source_of(
    row: RowPlan, b: int, r: int, sources: Tensor | None, row_sources: Tensor | None
) -> Tensor | None:
    """The prefix of one row, `[H_kv, L, 2D]`; `None` when the row reads no source."""
    if row.reads.sink_in_source.length + row.reads.window_in_source.length == 0:
        return None
    given = sources if row.source >= 0 else row_sources
    assert given is not None
    return given[row.source if row.source >= 0 else b, r]


def _gather(row: RowPlan, source: Tensor | None, slot: Tensor) -> Tensor:
    """Retained entries in stream order, `[H_kv, m, 2D]`, copied out of source and slot."""
    reads = row.reads
    places = (source, slot, source, slot, slot)
    parts = [slot[:, :0]]
    for place, (start, length) in zip(places, reads, strict=True):
        if place is not None and length:
            parts.append(place[:, start : start + length])
    return torch.cat(parts, dim=1)


def _attend_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    retained: Tensor,
    query_window: int | None,
    bias: Tensor | None,
) -> Tensor:
    """One row: `q [H, T, D]`, `k, v [H_kv, T, D]`, `retained [H_kv, m, 2D]` -> `[T, H, D]`."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_heads, num_tokens, head_dim = q.shape
    group = num_heads // k.shape[0]
    seen = torch.cat([retained.to(dtype), torch.cat([k, v], dim=-1).to(dtype)], dim=1)
    seen = seen.repeat_interleave(group, dim=0)
    keys, values = seen[..., :head_dim], seen[..., head_dim:]

    distance = _distances(retained.shape[1], num_tokens, q.device)
    scores = q.to(dtype) @ keys.transpose(1, 2)
    if bias is not None:
        entry = (distance + num_tokens - 1).expand(num_heads, -1, -1)
        scores = scores + bias.to(dtype).gather(2, entry)
    scores = scores / math.sqrt(head_dim)
    if query_window is not None:
        hidden = (distance < 0) | (distance > query_window)
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(dim=-1) @ values).transpose(0, 1).to(q.dtype)


def _distances(num_retained: int, num_tokens: int, device: torch.device) -> Tensor:
    """How far each key lies behind each query in retained order: `[T, m + T]` ints."""
    order = torch.arange(num_retained + num_tokens, device=device)
    return order[num_retained:, None] - order[None, :]


@torch.no_grad()
def _store(row: RowPlan, k: Tensor, v: Tensor, slot: Tensor, reverse: bool) -> None:
    """Put a segment's tokens where its plan says: `k, v [rows, H_kv, T, D]` into its `slot`."""
    head_dim = k.shape[-1]
    for offset, start, length in row.writes:
        if length:
            steps = torch.arange(length, device=k.device)
            tokens = offset - steps if reverse else offset + steps
            place = slot[:, :, start : start + length]
            place[..., :head_dim] = k[:, :, tokens].to(slot.dtype)
            place[..., head_dim:] = v[:, :, tokens].to(slot.dtype)
