"""Attention over a slot pool on CPUs, in vectorised PyTorch: no loop over rows or tokens.

A step's retained entries are gathered, with its own tokens behind them, into a dense scratch that
stays in the cache, a few heads at a time, and go through torch's SDPA. What to gather, mask and
store is worked out once per step and shared by all layers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vllm_bounded_kv.attention.checks import check, needs_of
from vllm_bounded_kv.layout import MAX_READS, MAX_WRITES
from vllm_bounded_kv.rows import Ints, reads_of, writes_of
from vllm_bounded_kv.step_plan import StepPlan

SCRATCH_BYTES = 9 << 18
"""Of keys and values gathered at a time, so that they are still in a cache when they are read. Of
1 to 20 MiB, the best or near it for 8 rows of 512 entries, at 1 and at 16 tokens."""


_OF_THREAD = threading.local()
"""One scratch for each dtype, of `SCRATCH_BYTES` or one row of one head."""


@dataclass(frozen=True)
class Gather:
    """Entries of a source storage that take their places among the keys, ordered by row."""

    entries: Tensor
    """`[n]` int64, of the storage as `[all ahead of the head, H_kv, entries]` flat, at head 0."""
    rows: Tensor
    """`[n]` of the batch."""
    keys: Tensor
    """`[n]` place among the row's keys."""
    begins: list[int]
    """`[R + 1]` where each row's part begins."""


@dataclass(frozen=True)
class Stores:
    """`n` tokens to keep."""

    segments: Tensor
    tokens: Tensor
    slots: Tensor
    entries: Tensor


@dataclass(frozen=True)
class Chunk:
    """Some rows and some KV heads, attended at a time: `r` rows, `h` heads, `M + T` keys."""

    rows: slice
    heads: slice
    in_slots: Tensor
    """`[r * h * (M + T)]` int64 entry of the slots for every key, flat. Where the key lies
    elsewhere, an entry that the row reads anyway, so that no garbage is touched."""
    blank: Tensor | None
    """`[r, 1, 1, 1]` rows that read no entry of their slot, of which there are some: what is
    gathered there is of no meaning."""
    mask: Tensor | None
    """`[r, 1, group * T, M + T]`; `None` when every key is seen by every query. 0 or -inf, to be
    added to the scores; with a bias, what it is to be -inf for."""


@dataclass(frozen=True)
class Prepared:
    """What all layers of a step share: rows of `M + T` keys, own tokens last."""

    chunks: list[Chunk]
    num_keys: int
    """`M + T`."""
    in_sources: Gather | None
    in_row_sources: Gather | None
    bias_index: Tensor | None
    """`[B * rows, 1, T, M + T]` int64 index into `rel_bias`, where that is given."""
    stores: Stores | None


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
    batch, num_heads, num_tokens, head_dim = q.shape
    if out is None:
        out = q.new_empty(batch, num_tokens, num_heads, head_dim)
    if not batch:
        return out
    # Half precision is widened: CPUs are no faster at it.
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    layout = Layout(
        num_tokens=num_tokens,
        rows=slots.shape[1],
        num_heads=slots.shape[2],
        slot_tokens=slots.shape[3],
        source_len=0 if sources is None else sources.shape[3],
        row_source_len=0 if row_sources is None else row_sources.shape[3],
        query_window=query_window,
        reverse_step_order=reverse_step_order,
        has_bias=rel_bias is not None,
        group=num_heads // slots.shape[2],
        head_dim=head_dim,
        dtype=dtype,
    )
    step = plan.derived(layout, lambda: _prepare(plan, layout))

    group, num_keys = num_heads // slots.shape[2], step.num_keys
    # Query heads of one KV head side by side: [R, H_kv, group * T, D]
    queries = q.to(dtype).reshape(batch, -1, group * num_tokens, head_dim)
    results = out.view(batch, num_tokens, -1, group, head_dim).permute(0, 2, 3, 1, 4)
    entries = slots.view(-1, 2 * head_dim)
    overlays = [
        (given, gather)
        for given, gather in ((sources, step.in_sources), (row_sources, step.in_row_sources))
        if given is not None and gather is not None
    ]
    # Where gradients are asked for, autograd keeps what was gathered.
    inputs = (q, k, v, sources, row_sources, rel_bias)
    is_kept = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    for chunk in step.chunks:
        some, heads = chunk.rows, chunk.heads
        seen = _gather(entries, chunk.in_slots, is_kept).to(dtype)
        seen = seen.view(some.stop - some.start, -1, num_keys, 2 * head_dim)
        if chunk.blank is not None:
            seen.masked_fill_(chunk.blank, 0)
        for given, gather in overlays:
            _overlay(seen, given, gather, some, heads)
        seen[:, :, -num_tokens:, :head_dim] = k[some, heads]
        seen[:, :, -num_tokens:, head_dim:] = v[some, heads]
        bias = chunk.mask
        if rel_bias is not None:
            assert step.bias_index is not None
            own = rel_bias[some, heads.start * group : heads.stop * group].to(dtype)
            bias = _bias(own, step.bias_index[some], chunk.mask, head_dim, group)
        attended = F.scaled_dot_product_attention(
            queries[some, heads], seen[..., :head_dim], seen[..., head_dim:], attn_mask=bias
        )
        results[some, heads] = attended.unflatten(2, (group, num_tokens)).to(out.dtype)
    if step.stores is not None:
        _store(step.stores, k, v, slots)
    return out


def _gather(entries: Tensor, index: Tensor, is_kept: bool) -> Tensor:
    """`[n, 2D]`; unless `is_kept`, good until the next call."""
    if not len(entries):  # nothing is ever retained
        return entries.new_empty(len(index), entries.shape[1])
    if is_kept:
        return entries.index_select(0, index)
    into = _scratch(len(index) * entries.shape[1], entries.dtype).view(len(index), -1)
    return torch.index_select(entries, 0, index, out=into)


def _scratch(size: int, dtype: torch.dtype) -> Tensor:
    """Memory of this thread's for `size` elements, the same again and again: fresh pages from the
    system take longer than what is copied there."""
    held: dict[Any, Tensor] = _OF_THREAD.__dict__
    if dtype not in held or held[dtype].numel() < size:
        with torch.inference_mode(False):  # else it could not be written to outside of that mode
            held[dtype] = torch.empty(size, dtype=dtype)
    return held[dtype][:size]


def _overlay(seen: Tensor, source: Tensor, gather: Gather, some: slice, heads: slice) -> None:
    """Put the entries of a source storage in their places of `seen` `[r, h, M + T, 2D]`."""
    part = slice(gather.begins[some.start], gather.begins[some.stop])
    num_heads, num_keys, width = seen.shape[1:]
    head = torch.arange(num_heads)[:, None]
    entries = gather.entries[part] + (head + heads.start) * source.shape[3]
    places = (gather.rows[part] - some.start) * (num_heads * num_keys) + gather.keys[part]
    places = places + head * num_keys
    found = source.reshape(-1, width).index_select(0, entries.view(-1))
    seen.view(-1, width).index_copy_(0, places.view(-1), found.to(seen.dtype))


def _bias(
    rel_bias: Tensor, index: Tensor, mask: Tensor | None, head_dim: int, group: int
) -> Tensor:
    """What is added to the scaled scores, `[r, h, group * T, M + T]`.

    Args:
        rel_bias: `[r, h * group, T, ...]`.
        index: `[r, 1, T, M + T]`.
        mask: as `Chunk.mask`.
        head_dim: `D`.
        group: query heads per KV head.
    """
    bias = rel_bias.gather(3, index.expand(-1, rel_bias.shape[1], -1, -1))
    bias /= math.sqrt(head_dim)
    bias = bias.view(len(bias), -1, group * bias.shape[2], bias.shape[3])
    # Where nothing is seen the bias may be anything, NaN too.
    return bias if mask is None else bias.masked_fill_(mask, -math.inf)


@torch.no_grad()
def _store(stores: Stores, k: Tensor, v: Tensor, slots: Tensor) -> None:
    rows, head_dim = slots.shape[1], k.shape[-1]
    for tensor, half in ((k, slots[..., :head_dim]), (v, slots[..., head_dim:])):
        fresh = tensor.unflatten(0, (-1, rows))[stores.segments, :, :, stores.tokens]
        half[stores.slots, :, :, stores.entries] = fresh.to(slots.dtype)


@dataclass(frozen=True)
class Layout:
    """What `Prepared` depends on beside the plan."""

    num_tokens: int
    rows: int
    num_heads: int
    """KV heads."""
    slot_tokens: int
    source_len: int
    """Entries of the shared sources' storage, as it is given; 0: none is."""
    row_source_len: int
    query_window: int | None
    reverse_step_order: bool
    has_bias: bool
    group: int
    """Query heads per KV head."""
    head_dim: int
    dtype: torch.dtype


def _prepare(plan: StepPlan, layout: Layout) -> Prepared:
    """`[B]` of the plan become `[R]` here; a segment's rows differ in where their entries lie."""
    rows, num_tokens = layout.rows, layout.num_tokens
    table = plan.host.astype(np.int64)
    starts, lengths = reads_of(table)[..., 0], reads_of(table)[..., 1]
    ends = lengths.cumsum(axis=1)
    num_retained = ends[:, -1:]
    order = np.arange(needs_of(plan).num_retained)[None, :]
    piece = (order[:, :, None] >= ends[:, None, :]).sum(axis=2)  # MAX_READS: no entry
    shift: Ints = np.pad(starts - (ends - lengths), ((0, 0), (0, 1)))
    entry = order + np.take_along_axis(shift, piece, axis=1)

    in_slot = np.isin(piece, (1, 3, 4))
    # The first entry that a row reads of its slot stands in for all that is not there.
    reads_slot = in_slot.any(axis=1)
    stand_in = np.zeros(len(table), dtype=np.int64)
    if reads_slot.any():
        stand_in[reads_slot] = entry[reads_slot, in_slot[reads_slot].argmax(axis=1)]
    keys = np.repeat(stand_in[:, None], order.shape[1] + num_tokens, axis=1)
    keys[:, : order.shape[1]] = np.where(in_slot, entry, keys[:, : order.shape[1]])
    in_slots = _per_row(keys, table[:, 0], layout, layout.slot_tokens)
    blank = torch.from_numpy(np.repeat(~reads_slot, rows))[:, None, None, None]

    in_source, is_shared = np.isin(piece, (0, 2)), table[:, 1:2] >= 0
    position = np.concatenate(
        [np.broadcast_to(order, entry.shape), num_retained + np.arange(num_tokens)], axis=1
    )
    distance = position[:, -num_tokens:, None] - position[:, None, :]  # [B, T, M + T]
    is_key = np.pad(piece < MAX_READS, ((0, 0), (0, num_tokens)), constant_values=True)
    seen = np.broadcast_to(is_key[:, None, :], distance.shape)
    if layout.query_window is not None:
        seen = seen & (distance >= 0) & (distance <= layout.query_window)
    mask = None
    if not seen.all():
        mask = torch.from_numpy(~seen)
        if not layout.has_bias:
            mask = torch.zeros(mask.shape, dtype=layout.dtype).masked_fill_(mask, -math.inf)
        mask = mask.repeat(1, layout.group, 1).repeat_interleave(rows, dim=0)[:, None]
    bias_index = None
    if layout.has_bias:
        # Hidden keys may be further off than the bias reaches: any entry will do.
        bias_index = torch.from_numpy(np.where(seen, distance + num_tokens - 1, 0))
        bias_index = bias_index.repeat_interleave(rows, dim=0)[:, None]
    return Prepared(
        chunks=list(_chunks(layout, in_slots, None if reads_slot.all() else blank, mask)),
        num_keys=keys.shape[1],
        in_sources=_from_source(
            in_source & is_shared, entry, table[:, 1], layout, layout.source_len
        ),
        in_row_sources=_from_source(
            in_source & ~is_shared, entry, np.arange(len(table)), layout, layout.row_source_len
        ),
        bias_index=bias_index,
        stores=_stores(table, layout.reverse_step_order),
    )


def _chunks(
    layout: Layout, in_slots: Tensor, blank: Tensor | None, mask: Tensor | None
) -> Iterator[Chunk]:
    """Cut `[R, H_kv]` so that a chunk's keys and values fit `SCRATCH_BYTES`: by heads, and by rows
    where one head of all of them does not.

    Args:
        layout: of the step.
        in_slots: `[R, M + T]` int64 entries of head 0.
        blank: `[R, 1, 1, 1]`.
        mask: `[R, 1, group * T, M + T]`.
    """
    num_rows, num_keys = in_slots.shape
    row_bytes = num_keys * 2 * layout.head_dim * layout.dtype.itemsize
    num_heads = max(1, min(layout.num_heads, SCRATCH_BYTES // (row_bytes * num_rows)))
    some_rows = max(1, min(num_rows, SCRATCH_BYTES // row_bytes))
    for first_head in range(0, layout.num_heads, num_heads):
        heads = slice(first_head, min(first_head + num_heads, layout.num_heads))
        shift = torch.arange(heads.start, heads.stop)[:, None] * layout.slot_tokens
        for first_row in range(0, num_rows, some_rows):
            rows = slice(first_row, min(first_row + some_rows, num_rows))
            yield Chunk(
                rows,
                heads,
                (in_slots[rows, None] + shift).flatten(),
                None if blank is None else blank[rows],
                None if mask is None else mask[rows],
            )


def _per_row(entries: Ints, owner: Ints, layout: Layout, length: int) -> Tensor:
    """`entries` `[B, n]` of storages `owner` `[B]`, flat at head 0: `[R, n]`."""
    row = owner[:, None] * layout.rows + np.arange(layout.rows)
    flat = entries[:, None, :] + (row * layout.num_heads * length)[:, :, None]
    return torch.from_numpy(flat.reshape(-1, entries.shape[1]))


def _from_source(
    which: NDArray[np.bool_], entries: Ints, owner: Ints, layout: Layout, length: int
) -> Gather | None:
    """The keys `which` `[B, M]`, from the storages `owner` `[B]` of `length` entries."""
    if not which.any():
        return None
    in_storage = _per_row(entries, owner, layout, length).numpy()
    which = np.repeat(which, layout.rows, axis=0)
    rows, keys = np.nonzero(which)
    begins = np.concatenate([[0], which.sum(axis=1).cumsum()])
    return Gather(
        entries=torch.from_numpy(in_storage[rows, keys]),
        rows=torch.from_numpy(rows),
        keys=torch.from_numpy(keys),
        begins=begins.tolist(),
    )


def _stores(table: Ints, reverse_step_order: bool) -> Stores | None:
    writes = writes_of(table).reshape(-1, 3)
    lengths = writes[:, 2]
    which = np.repeat(np.arange(len(writes)), lengths)
    if not len(which):
        return None
    step = np.arange(len(which)) - np.repeat(lengths.cumsum() - lengths, lengths)
    segments = which // MAX_WRITES
    tokens = writes[which, 0] + (-step if reverse_step_order else step)
    places = (segments, tokens, table[segments, 0], writes[which, 1] + step)
    return Stores(*(torch.from_numpy(place) for place in places))
