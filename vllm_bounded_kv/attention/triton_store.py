"""The store kernel: a step's keys and values into the slots, as the plan's table says.

It is launched after the attention kernel on the same stream, so every read of a step comes before
any of its writes. Values are cast to the slots' dtype and otherwise stored as they are.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "num_kv_heads"])
def store_kernel(
    k,
    v,
    slots,
    table,
    k_strides,
    v_strides,
    slot_strides,
    rows,
    num_kv_heads,
    ROW_INTS: tl.constexpr,
    FIRST_WRITE: tl.constexpr,
    NUM_WRITES: tl.constexpr,
    REVERSE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The grid is (rows * KV heads, tiles of `NUM_TOKENS` tokens of a write).

    `k, v`: `[B * rows, H_kv, T, D]`; `slots`: `[num_slots, rows, H_kv, slot_tokens, 2D]`. With
    `REVERSE` a write's tokens count down from its offset. `WIDTH`: D made a power of two.
    """
    row = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    head = tl.program_id(0) % num_kv_heads
    ints = table + (row // rows) * ROW_INTS
    slot = tl.load(ints).to(tl.int64)
    slot_base = slots + slot * slot_strides[0] + row % rows * slot_strides[1]
    slot_base += head * slot_strides[2]
    k_base = k + row * k_strides[0] + head * k_strides[1]
    v_base = v + row * v_strides[0] + head * v_strides[1]

    dims = tl.arange(0, WIDTH)
    step = tl.program_id(1) * NUM_TOKENS + tl.arange(0, NUM_TOKENS)
    for write in tl.static_range(NUM_WRITES):
        offset = tl.load(ints + FIRST_WRITE + 3 * write)
        start = tl.load(ints + FIRST_WRITE + 3 * write + 1)
        length = tl.load(ints + FIRST_WRITE + 3 * write + 2)
        token = offset - step if REVERSE else offset + step
        mask = (step < length)[:, None] & (dims < HEAD_DIM)[None, :]
        to = slot_base + (start + step).to(tl.int64)[:, None] * slot_strides[3] + dims[None, :]
        at = token[:, None] * k_strides[2] + dims[None, :] * k_strides[3]
        fresh = tl.load(k_base + at, mask=mask, other=0.0)
        tl.store(to, fresh.to(slots.dtype.element_ty), mask=mask)
        at = token[:, None] * v_strides[2] + dims[None, :] * v_strides[3]
        fresh = tl.load(v_base + at, mask=mask, other=0.0)
        tl.store(to + HEAD_DIM, fresh.to(slots.dtype.element_ty), mask=mask)
