"""Paged attention in Triton: flash attention whose keys come from two places.

One program serves a tile of queries of one row and one KV head, with the query heads of that KV
head folded into the tile. It visits the sink and then the window, of each first what is cached,
then the step's own; key tiles that no query of the tile sees are not visited. Programs find their
row themselves, so the grid depends on `N` and `B` alone.

Rotary positions that fall back inside a row: with `f` the fallbacks of a position, the query at
`p` needs the window's key at `k` turned by `-(f(p) - f(k))` periods. Turning the query by
`f(p) - f0` and the key by `f(k) - f0` gives the same score, for `f0` of the tile's first query. So
a tile may cross boundaries, and where it and its keys lie in one period nothing is turned at all.
The sink's keys meet the query as it is.

Invariant: entries outside `[lo, hi)` of a visit are neither loaded nor multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_bounded_kv.attention import paged
from vllm_bounded_kv.attention.paged import Turns
from vllm_bounded_kv.attention.triton_rotate import cos_sin, num_fallbacks, partner

LOG2_E = 1.4426950408889634
_FIRST = tl.constexpr(paged.FIRST)
_LENGTH = tl.constexpr(paged.LENGTH)
_BEFORE = tl.constexpr(paged.BEFORE)
_SINK = tl.constexpr(paged.SINK)
_RING = tl.constexpr(paged.RING)
_LIMIT = tl.constexpr(paged.LIMIT)
_COLUMNS = tl.constexpr(paged.COLUMNS)


class Tiling(NamedTuple):
    """Rows of a tile (queries times their heads of one KV head), and its keys; powers of two."""

    queries: int = 64
    keys: int = 64
    stages: int = 2
    """Tiles of keys that are loaded or on their way at a time."""

    @classmethod
    def fitting(cls, query: Tensor, group: int, is_turned: bool) -> Tiling:
        """The largest that fits the shared memory of the device.

        What the compiler takes stays below the estimate here: `tests/support/compile_kernels.py`
        asks it, for GPUs from compute capability 8.0 on.
        """
        width = max(16, triton.next_power_of_2(query.shape[-1]))
        # Registers hold a tile's queries and sums; float32 products are written out one by one.
        is_wide = width > 128 or query.dtype == torch.float32
        room = shared_memory(query.device)
        for tiling in WIDE_TILINGS if is_wide else TILINGS:
            rows = max(tiling.queries, triton.next_power_of_2(group))
            keys = tiling.keys * tiling.stages * (3 if is_turned else 2)
            if width * query.itemsize * (rows + keys) <= room:
                return tiling
        return SMALLEST


SMALLEST = Tiling(16, 16, 1)
WIDE_TILINGS = [Tiling(32, 32, 2), Tiling(32, 32, 1), Tiling(16, 16, 2)]
TILINGS = [Tiling(64, 64, 3), Tiling(64, 64, 2), Tiling(64, 32, 2), *WIDE_TILINGS]


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; a CPU's interpreter knows no limit."""
    if device.type != "cuda":
        return 1 << 30
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    block_table: Tensor,
    scale: float,
    turns: Turns | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """See `paged.Attend`; `tiling` changes the speed only."""
    out = torch.zeros_like(query) if out is None else out
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    if tiling is None:
        tiling = Tiling.fitting(query, group, turns is not None)
    block_m = max(tiling.queries, triton.next_power_of_2(group))
    grid = (num_tokens // (block_m // group) + len(table), num_kv_heads)
    _attend[grid](
        query,
        key,
        value,
        key_cache,
        value_cache,
        out,
        table,
        block_table,
        table if turns is None else turns.turns,
        len(table),
        scale * LOG2_E,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *out.stride()[:2],
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        ROTARY_DIM=0 if turns is None else turns.rotary_dim,
        IS_NEOX=turns is not None and turns.is_neox,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=tiling.keys,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_stages=tiling.stages,
        # Triton 3.7's interpreter multiplies the bit patterns of bfloat16.
        UPCAST=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _attend(
    query,
    key,
    value,
    key_cache,
    value_cache,
    out,
    table,
    block_table,
    turns,
    num_rows,
    scale,  # times log2(e): the exponentials are powers of two
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    key_cache_block,
    key_cache_entry,
    key_cache_head,
    value_cache_block,
    value_cache_entry,
    value_cache_head,
    out_token,
    out_head,
    block_table_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of_tile(table, tile, num_rows, BLOCK_Q)
    fields = table + row * _COLUMNS
    first = tl.load(fields + _FIRST)
    length = tl.load(fields + _LENGTH)
    start = (tile - first // BLOCK_Q - row) * BLOCK_Q
    if start >= length:
        return
    before = tl.load(fields + _BEFORE)
    sink = tl.load(fields + _SINK)
    ring = tl.load(fields + _RING)
    capacity = sink + ring
    limit = tl.load(fields + _LIMIT)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = start + m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_query = (m < BLOCK_Q * GROUP) & (token < length)
    position = before + token
    begin = before + start
    end = before + tl.minimum(start + BLOCK_Q, length)  # past the tile's last query
    at = query + ((first + token).to(tl.int64) * query_token + head * query_head)[:, None]
    is_read = is_query[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(at + d[None, :], mask=is_read, other=0.0)

    # What the window's keys are turned to, and the queries that meet them.
    q_window = q
    other, turn, sign, period, fallen = d, d, d, 0, 0
    if ROTARY_DIM > 0:
        other, pair, sign = partner(d, ROTARY_DIM, IS_NEOX)
        turn = tl.load(turns + pair, mask=d < ROTARY_DIM, other=0)
        period = limit - capacity
        fallen = num_fallbacks(begin, capacity, limit)
        if num_fallbacks(end - 1, capacity, limit) > fallen:
            by = (num_fallbacks(position, capacity, limit) - fallen) * period
            cos, sin = cos_sin(by[:, None], turn[None, :])
            q_other = tl.load(at + other[None, :], mask=is_read, other=0.0)
            turned = q.to(tl.float32) * cos + q_other.to(tl.float32) * sin * sign[None, :]
            q_window = turned.to(q.dtype)

    own_key = key + kv_head * key_head + (first - before).to(tl.int64) * key_token
    own_value = value + kv_head * value_head + (first - before).to(tl.int64) * value_token
    cached_key = key_cache + kv_head.to(tl.int64) * key_cache_head
    cached_value = value_cache + kv_head.to(tl.int64) * value_cache_head
    blocks = block_table + row * block_table_row

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The sink, cached and own, then the window, cached and own.
    for part in tl.static_range(4):
        if part < 2:
            lo, hi = 0, tl.minimum(sink, end)
        else:
            lo, hi = tl.maximum(sink, begin - ring + 1), end
        if part % 2 == 0:
            hi = tl.minimum(hi, before)
        else:
            lo = tl.maximum(lo, before)
        for key_start in range(lo, hi, BLOCK_N):
            k_position = key_start + tl.arange(0, BLOCK_N)
            is_key = k_position < hi
            if part % 2 == 0:
                c = k_position
                if part == 2:
                    c = tl.where(c < capacity, c, sink + (c - sink) % ring)
                block = tl.load(blocks + c // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
                offset = c % BLOCK_SIZE
                k_at = cached_key + block * key_cache_block + offset * key_cache_entry
                v_at = cached_value + block * value_cache_block + offset * value_cache_entry
            else:
                k_at = own_key + k_position.to(tl.int64) * key_token
                v_at = own_value + k_position.to(tl.int64) * value_token
            is_loaded = is_key[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(k_at[:, None] + d[None, :], mask=is_loaded, other=0.0)
            v = tl.load(v_at[:, None] + d[None, :], mask=is_loaded, other=0.0)
            is_seen = is_query[:, None] & is_key[None, :]
            is_seen &= k_position[None, :] <= position[:, None]
            if part < 2:
                scores = _dot(q, tl.trans(k), None, UPCAST)
            else:
                is_seen &= k_position[None, :] > position[:, None] - ring
                if ROTARY_DIM > 0:
                    # Cached keys have been turned to the row's first token.
                    written = num_fallbacks(tl.maximum(k_position, before), capacity, limit)
                    by = tl.where(is_key, (written - fallen) * period, 0)
                    if tl.max(tl.abs(by), axis=0) > 0:
                        cos, sin = cos_sin(by[:, None], turn[None, :])
                        k_other = tl.load(k_at[:, None] + other[None, :], is_loaded, 0.0)
                        turned = k.to(tl.float32) * cos
                        turned += k_other.to(tl.float32) * sin * sign[None, :]
                        k = turned.to(k.dtype)
                scores = _dot(q_window, tl.trans(k), None, UPCAST)
            scores = tl.where(is_seen, scores * scale, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, axis=1))
            # A query that has seen nothing yet: no difference of infinities.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(peak - base)
            weights = tl.exp2(scores - base[:, None])
            total = total * shrink + tl.sum(weights, axis=1)
            acc = _dot(weights.to(v.dtype), v, acc * shrink[:, None], UPCAST)
            peak = higher
    # A query sees itself at least; rows of the tile without one have no sum, and are not stored.
    acc = acc / tl.where(is_query, total, 1.0)[:, None]
    to = out + ((first + token).to(tl.int64) * out_token + head * out_head)[:, None] + d[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=is_read)


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    # Sums in float32; float32 itself is not rounded to TF32.
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _row_of_tile(table, tile, num_rows, BLOCK_Q: tl.constexpr):
    # Row `r` gets the tiles from `first[r] // BLOCK_Q + r` on: at least as many as it fills. The
    # last row that begins at or before this tile, by bisection.
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(table + middle * _COLUMNS + _FIRST) // BLOCK_Q + middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    return low
