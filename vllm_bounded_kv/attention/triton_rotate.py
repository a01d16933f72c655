"""Pieces that the paged Triton kernels share: how often positions fell back, and turning by it.

Angles are products in int64 that drop full turns by overflowing (see `paged.Turns`). So quarters
are exact too, and sine and cosine are two short polynomials: with the library's, which must reduce
any float32, the attention kernel's code was twice as long.
"""

from __future__ import annotations

import triton
import triton.language as tl

_RADIANS = tl.constexpr(1.4629180792671596e-09)  # 2 pi / 2^32


@triton.jit
def num_fallbacks(position, capacity, limit):  # noqa: D103
    # `positions.num_fallbacks`; positions below the limit must not reach the division's result.
    return tl.where(position < limit, 0, (position - capacity) // (limit - capacity))


@triton.jit
def cos_sin(by, turns):  # noqa: D103
    # Of turning by `by` positions, int32, at `turns`, int64; broadcast. Within an eighth of a turn
    # of the nearest quarter, Cephes' polynomials are right to float32's last bit or two.
    angle = by.to(tl.int64) * turns
    quarter = ((angle >> 61) + 1) >> 1
    x = ((angle - (quarter << 62)) >> 32).to(tl.float32) * _RADIANS
    xx = x * x
    sin = x + x * xx * (-1.6666654611e-1 + xx * (8.3321608736e-3 - xx * 1.9515295891e-4))
    tail = 4.166664568298827e-2 - xx * (1.388731625493765e-3 - xx * 2.443315711809948e-5)
    cos = 1.0 - 0.5 * xx + xx * xx * tail
    is_odd = (quarter & 1) != 0
    turned_cos = tl.where(is_odd, sin, cos)
    turned_sin = tl.where(is_odd, cos, sin)
    turned_cos = tl.where(((quarter + 1) & 2) != 0, -turned_cos, turned_cos)
    turned_sin = tl.where((quarter & 2) != 0, -turned_sin, turned_sin)
    return turned_cos, turned_sin


@triton.jit
def partner(d, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr):  # noqa: D103
    # Of each dimension: the other of its pair, the pair's frequency, and the sine's sign.
    HALF: tl.constexpr = ROTARY_DIM // 2
    if IS_NEOX:
        is_first = d < HALF
        other = tl.where(is_first, d + HALF, d - HALF)
        pair = tl.where(is_first, d, d - HALF)
    else:
        is_first = d % 2 == 0
        other = tl.where(is_first, d + 1, d - 1)
        pair = d // 2
    other = tl.where(d < ROTARY_DIM, other, d)
    return other, pair, tl.where(is_first, -1.0, 1.0)
