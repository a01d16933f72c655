"""Attention over retained entries and a step's own tokens, then the stores: naive, in PyTorch.

Contract: row `b * rows + r` of the batch is row `r` of segment `b`. Every read happens before any
write. Scores and sums are computed in float64 when `q` is float64 and in float32 otherwise, the
result is rounded once, to `q`'s dtype; keys and values are stored without arithmetic, so bit-exact
when slots have their dtype. Only entries named by the plan are touched: garbage elsewhere, NaN
included, has no effect.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_bounded_kv.layout import RowPlan, Write


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    plan: Sequence[RowPlan | None],
    *,
    sources: Tensor | None = None,
    row_sources: Tensor | None = None,
    query_window: int | None = None,
    reverse_step_order: bool = False,
    rel_bias: Tensor | None = None,
) -> Tensor:
    """One layer of one step; changes `slots` in place, nothing else.

    Args:
        q: `[B * rows, H, T, D]`, `H` a multiple of `H_kv`.
        k, v: `[B * rows, H_kv, T, D]`.
        slots: `[num_slots, rows, H_kv, slot_tokens, 2D]`, keys in the first half of the last axis
            and values in the second.
        plan: `B` rows. `None` is padding: it reads and writes nothing and its output is zero. (A
            row of zeros does not touch slots either, but attends its own tokens as any step does.)
        sources: `[num_sources, rows, H_kv, L, 2D]`, shared prefixes, laid out as `slots`.
        row_sources: `[B, rows, H_kv, L, 2D]`, the prefixes of rows whose `source` is -1.
        query_window: `None`: every query sees all retained keys and all `T` of the step. Set: only
            keys at distances `[0, query_window]`, in tokens.
        reverse_step_order: whether a write's tokens count down from its offset.
        rel_bias: `[B * rows, H, T, m_max + 2T - 1]`, added to the scores before they are scaled;
            entry `distance + T - 1`, with distances in retained order.

    Returns:
        `[B * rows, T, H, D]`, in `q`'s dtype.

    Raises:
        ValueError: shapes do not fit each other or the plan, or a source that is read is missing.
    """
    rows = slots.shape[1]
    _check_shapes(q, k, v, slots, plan, rel_bias, reverse_step_order)
    out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    for b, row in enumerate(plan):
        if row is None:
            continue
        for r in range(rows):
            i = b * rows + r
            source = _source_of(row, b, r, sources, row_sources)
            retained = _gather(row, source, slots[row.slot, r])
            bias = None if rel_bias is None else rel_bias[i]
            out[i] = _attend_row(q[i], k[i], v[i], retained, query_window, bias)
    for b, row in enumerate(plan):
        if row is not None:
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
    if given is None:
        name = "sources" if row.source >= 0 else "row_sources"
        raise ValueError(f"{name} must be given: plan[{b}].source is {row.source}, got None")
    return given[row.source if row.source >= 0 else b, r]


def _gather(row: RowPlan, source: Tensor | None, slot: Tensor) -> Tensor:
    """Retained entries in stream order, `[H_kv, m, 2D]`, copied out of source and slot."""
    reads = row.reads
    places = (source, slot, source, slot, slot)
    parts = [slot[:, :0]]
    for place, (start, length) in zip(places, reads, strict=True):
        if place is not None and length:
            if start + length > place.shape[1]:
                raise ValueError(
                    f"plan reads entries [{start}, {start + length}) of {place.shape[1]}"
                )
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


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    plan: Sequence[RowPlan | None],
    rel_bias: Tensor | None,
    reverse: bool,
) -> None:
    batch, num_heads, num_tokens, head_dim = q.shape
    _, rows, num_kv_heads, _, _ = slots.shape
    if batch != len(plan) * rows:
        raise ValueError(f"q must have len(plan) * rows = {len(plan) * rows} rows, got {batch}")
    expected = (batch, num_kv_heads, num_tokens, head_dim)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != expected:
            raise ValueError(f"{name} must be {expected}, got {tuple(tensor.shape)}")
    if slots.shape[-1] != 2 * head_dim:
        raise ValueError(f"slots must end in 2D = {2 * head_dim}, got {slots.shape[-1]}")
    if num_heads % num_kv_heads:
        raise ValueError(f"H must be a multiple of H_kv = {num_kv_heads}, got {num_heads}")
    for b, row in enumerate(plan):
        tokens = 0 if row is None else 1 + max(_last_token(w, reverse) for w in row.writes)
        if tokens > num_tokens:
            raise ValueError(f"plan[{b}] must add at most T = {num_tokens} tokens, got {tokens}")
    if rel_bias is not None:
        longest = max((row.num_retained for row in plan if row is not None), default=0)
        needed = longest + 2 * num_tokens - 1
        if rel_bias.shape[:3] != q.shape[:3] or rel_bias.shape[3] < needed:
            raise ValueError(
                f"rel_bias must be {(*q.shape[:3], needed)} or longer, got {tuple(rel_bias.shape)}"
            )


def _last_token(write: Write, reverse: bool) -> int:
    """Highest index of the step's tokens that a write stores; -1 when it stores none."""
    if not write.length:
        return -1
    return write.offset if reverse else write.offset + write.length - 1
