"""What changes the paged cache, in Triton: storing a step's tokens, and turning cached keys.

Invariant: a program reads all it needs of an element before it writes it, and no two programs
touch the same one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_bounded_kv.attention import paged
from vllm_bounded_kv.attention.paged import Turns
from vllm_bounded_kv.attention.triton_rotate import cos_sin, num_fallbacks

_LENGTH = tl.constexpr(paged.LENGTH)
_BEFORE = tl.constexpr(paged.BEFORE)
_SINK = tl.constexpr(paged.SINK)
_RING = tl.constexpr(paged.RING)
_LIMIT = tl.constexpr(paged.LIMIT)
_COLUMNS = tl.constexpr(paged.COLUMNS)
KEYS = 32
"""Keys that a program turns."""


def store(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """See `paged.Store`."""
    _, num_kv_heads, head_dim = key.shape
    _store[(len(slots),)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        NUM_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _store(
    key,
    value,
    key_cache,
    value_cache,
    slots,
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
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.arange(0, BLOCK_H)[:, None].to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < NUM_HEADS) & (d < HEAD_DIM)
    k = tl.load(key + token * key_token + head * key_head + d, mask=mask)
    v = tl.load(value + token * value_token + head * value_head + d, mask=mask)
    k_to = key_cache + block * key_cache_block + offset * key_cache_entry + head * key_cache_head
    v_to = value_cache + block * value_cache_block + offset * value_cache_entry
    tl.store(k_to + d, k, mask=mask)
    tl.store(v_to + head * value_cache_head + d, v, mask=mask)


def turn_first(key_cache: Tensor, table: Tensor, block_table: Tensor, turns: Turns) -> None:
    """See `paged.Turn`."""
    _launch(key_cache, table, block_table, turns, is_last=False)


def turn_last(key_cache: Tensor, table: Tensor, block_table: Tensor, turns: Turns) -> None:
    """See `paged.Turn`."""
    _launch(key_cache, table, block_table, turns, is_last=True)


def _launch(
    key_cache: Tensor, table: Tensor, block_table: Tensor, turns: Turns, is_last: bool
) -> None:
    block_size, num_kv_heads = key_cache.shape[1:3]
    half = len(turns.turns)
    # Hardly a step turns a ring, and the host does not know which: one program each, and head.
    grid = (len(table), num_kv_heads)
    _turn[grid](
        key_cache,
        table,
        block_table,
        turns.turns,
        *key_cache.stride()[:3],
        block_table.stride(0),
        IS_LAST=is_last,
        HALF=half,
        IS_NEOX=turns.is_neox,
        BLOCK_SIZE=block_size,
        BLOCK_N=KEYS,
        BLOCK_D=triton.next_power_of_2(half),
    )


@triton.jit
def _turn(
    key_cache,
    table,
    block_table,
    turns,
    key_cache_block,
    key_cache_entry,
    key_cache_head,
    block_table_row,
    IS_LAST: tl.constexpr,
    HALF: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0)
    fields = table + row * _COLUMNS
    length = tl.load(fields + _LENGTH)
    if length == 0:
        return
    before = tl.load(fields + _BEFORE)
    sink = tl.load(fields + _SINK)
    ring = tl.load(fields + _RING)
    limit = tl.load(fields + _LIMIT)
    capacity = sink + ring
    last = before + length - 1
    at_first = num_fallbacks(before, capacity, limit)
    if IS_LAST:
        target = num_fallbacks(last, capacity, limit)
        if target == at_first:
            return
    else:
        target = at_first
        if target == num_fallbacks(before - 1, capacity, limit):
            return
    # From here on the ring is full: the limit is beyond the capacity.
    head_at = key_cache + tl.program_id(1).to(tl.int64) * key_cache_head
    blocks = block_table + row * block_table_row
    i = tl.arange(0, BLOCK_D)
    turn = tl.load(turns + i, mask=i < HALF, other=0)
    for start in range(0, ring, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        c = sink + n
        if IS_LAST:
            position = last - (last - c) % ring  # the newest that has this compact index
            # What was there before the step has been turned to its first token.
            fallen = num_fallbacks(tl.maximum(position, before), capacity, limit)
            by = (fallen - target) * (limit - capacity)
        else:
            by = tl.zeros([BLOCK_N], tl.int32) - (limit - capacity)
        is_turned = (n < ring) & (by != 0)

        block = tl.load(blocks + c // BLOCK_SIZE, mask=is_turned, other=0).to(tl.int64)
        at = head_at + block * key_cache_block + (c % BLOCK_SIZE) * key_cache_entry
        # Both of a pair in one thread: another might have written the one before this reads it.
        if IS_NEOX:
            a_at = at[:, None] + i[None, :]
            b_at = a_at + HALF
        else:
            a_at = at[:, None] + 2 * i[None, :]
            b_at = a_at + 1
        mask = is_turned[:, None] & (i < HALF)[None, :]
        cos, sin = cos_sin(by[:, None], turn[None, :])
        a = tl.load(a_at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_at, mask=mask, other=0.0).to(tl.float32)
        element: tl.constexpr = key_cache.dtype.element_ty
        tl.store(a_at, (a * cos - b * sin).to(element), mask=mask)
        tl.store(b_at, (b * cos + a * sin).to(element), mask=mask)
