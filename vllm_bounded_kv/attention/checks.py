"""Whether the arguments of `attend` fit each other; no kernel looks again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vllm_bounded_kv.rows import reads_of, writes_of
from vllm_bounded_kv.step_plan import StepPlan


@dataclass(frozen=True)
class Needs:
    """What a plan asks of the tensors it is used with."""

    num_tokens: tuple[int, int]
    """Of the step: for writes that count up, and for writes that count down."""
    span: int
    """Most tokens of the step that join a stream, whether they are stored or not."""
    num_retained: int
    """Most entries that a row retains: the `m_max` of `rel_bias`."""
    num_sources: int
    source_len: int
    """Longest prefix that is read of the shared sources; 0: none is."""
    row_source_len: int
    num_slots: int
    slot_tokens: int


def needs_of(plan: StepPlan) -> Needs:
    """Worked out once a step."""
    return plan.derived("needs", lambda: _needs(plan))


def _needs(plan: StepPlan) -> Needs:
    if not len(plan):
        return Needs((0, 0), 0, 0, 0, 0, 0, 0, 0)
    rows = plan.host
    reads, writes = reads_of(rows), writes_of(rows)
    read_end = reads.sum(axis=2) * (reads[..., 1] > 0)
    from_source = read_end[:, [0, 2]].max(axis=1)
    is_shared = rows[:, 1] >= 0
    does_write = writes[..., 2] > 0
    up = (writes[..., 0] + writes[..., 2]) * does_write
    down = (writes[..., 0] + 1) * does_write
    in_slot = np.maximum(
        read_end[:, [1, 3, 4]].max(axis=1), (writes[..., 1:].sum(axis=2) * does_write).max(axis=1)
    )
    return Needs(
        num_tokens=(int(up.max()), int(down.max())),
        span=int(plan.spans.max()),
        num_retained=int(reads[..., 1].sum(axis=1).max()),
        num_sources=int((rows[:, 1] + 1)[from_source > 0].max(initial=0)),
        source_len=int((from_source * is_shared).max()),
        row_source_len=int((from_source * ~is_shared).max()),
        num_slots=int((rows[:, 0] + 1)[in_slot > 0].max(initial=0)),
        slot_tokens=int(in_slot.max()),
    )


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    plan: StepPlan,
    sources: Tensor | None,
    row_sources: Tensor | None,
    rel_bias: Tensor | None,
    out: Tensor | None,
    reverse_step_order: bool,
) -> None:
    """Check the arguments of `attend`.

    Raises:
        ValueError: what does not fit, its shape and what it must be.
    """
    batch, num_heads, num_tokens, head_dim = q.shape
    num_slots, rows, num_kv_heads, slot_tokens, width = slots.shape
    needs = needs_of(plan)
    if batch != len(plan) * rows:
        raise ValueError(f"q must have len(plan) * rows = {len(plan) * rows} rows, got {batch}")
    if num_heads % num_kv_heads:
        raise ValueError(f"H must be a multiple of H_kv = {num_kv_heads}, got {num_heads}")
    expected = (batch, num_kv_heads, num_tokens, head_dim)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != expected:
            raise ValueError(f"{name} must be {expected}, got {tuple(tensor.shape)}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
    if width != 2 * head_dim:
        raise ValueError(f"slots must end in 2D = {2 * head_dim}, got {width}")
    if needs.num_slots > num_slots or needs.slot_tokens > slot_tokens:
        raise ValueError(
            f"slots must hold {needs.num_slots} slots of {needs.slot_tokens} entries for this "
            f"plan, got {num_slots} of {slot_tokens}"
        )
    if not num_tokens:
        raise ValueError(f"q must have T of at least 1 token, got {tuple(q.shape)}")
    added = max(needs.span, needs.num_tokens[reverse_step_order])
    if added > num_tokens:
        raise ValueError(f"the plan must add at most T = {num_tokens} tokens a row, got {added}")
    inner = (rows, num_kv_heads)
    needed = (needs.num_sources, *inner, needs.source_len, width)
    is_enough = sources is None or sources.shape[0] >= needs.num_sources
    _check_source("sources", sources, needed, is_enough)
    needed = (len(plan), *inner, needs.row_source_len, width)
    # One for each segment, and no more: of a larger batch's, the first would be taken.
    is_enough = row_sources is None or row_sources.shape[0] == len(plan)
    _check_source("row_sources", row_sources, needed, is_enough)
    if rel_bias is not None:
        needed = (*q.shape[:3], needs.num_retained + 2 * num_tokens - 1)
        if rel_bias.shape[:3] != needed[:3] or rel_bias.shape[3] < needed[3]:
            raise ValueError(f"rel_bias must be {needed} or longer, got {tuple(rel_bias.shape)}")
    if out is not None:
        wanted = (batch, num_tokens, num_heads, head_dim)
        if out.shape != wanted or out.dtype != q.dtype or not out.is_contiguous():
            raise ValueError(
                f"out must be {wanted}, contiguous, of q's dtype {q.dtype}, "
                f"got {tuple(out.shape)}, {out.dtype}"
            )
        for name, tensor in (("q", q), ("k", k), ("v", v), ("slots", slots)):
            if _overlap(out, tensor):
                raise ValueError(f"out must have memory of its own: it overlaps {name}")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes that two tensors span have any in common."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (a_first, a_end), (b_first, b_end) = _bytes_of(a), _bytes_of(b)
    return a_first < b_end and b_first < a_end


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (last + 1) * tensor.itemsize


def _check_source(
    name: str, given: Tensor | None, needed: tuple[int, ...], is_enough: bool
) -> None:
    """Check a storage `[number, rows, H_kv, L, 2D]` whose `number` is enough or not."""
    if given is None:
        if needed[3]:
            raise ValueError(f"{name} must be given: the plan reads it, {needed}")
        return
    # Looked at even where nothing of it is read: it may be something else, given in its place.
    shape = tuple(given.shape)
    fits = len(shape) == 5 and (shape[1:3], shape[4]) == (needed[1:3], needed[4])
    if not fits or not is_enough or shape[3] < needed[3]:
        raise ValueError(f"{name} must be {needed} or longer, got {shape}")
