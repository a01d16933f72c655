"""The attention kernel and its merge: what a step decides is read from the plan's table.

One program folds the keys of one KV head of one row into a tile of its queries: those of all query
heads of the group, ordered by token, then head. Keys are tiled in retained order, the five reads
end to end, then the step's own tokens; tiles that lie before every query's window are not visited.
With several programs to a tile of queries (`program_id(2)`), each folds a run of the keys, and
`merge_kernel` adds up what they found.

Invariant: nothing is loaded from an entry that the plan does not name, so garbage there, NaN
included, has no effect; and nothing but `out` and `partial` is written.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

# A value that changes from step to step must not make another kernel of it: it would be compiled
# while requests wait.
ATTEND_SIZES = ["rows", "num_kv_heads", "group", "num_tokens", "query_window", "bias_strides"]
MERGE_SIZES = ["num_splits", "num_kv_heads", "group", "num_tokens"]


@triton.jit(do_not_specialize=ATTEND_SIZES)
def attend_kernel(
    q,
    k,
    v,
    slots,
    sources,
    row_sources,
    rel_bias,
    table,
    out,
    partial,
    q_strides,
    k_strides,
    v_strides,
    slot_strides,
    source_strides,
    row_source_strides,
    bias_strides,
    rows,
    num_kv_heads,
    group,
    num_tokens,
    query_window,
    ROW_INTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    ONE_DTYPE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attention of one tile of queries; the grid is (rows * KV heads, query tiles, splits).

    `q, k, v, slots, sources, row_sources, rel_bias, out`: as `Attend` has them, with their strides;
    optional ones may be `None`. Capitals: `NUM_QUERIES` and `NUM_KEYS` to a tile, `WIDTH` the
    head's dimensions made a power of two, `OPERAND` and `SUM` the dtypes of products and of sums,
    `SCALE` of scores in powers of two, `ONE_DTYPE`: slots and sources are alike, `SPLIT`: several
    programs share a tile and write to `partial`.
    """
    row = tl.program_id(0) // num_kv_heads
    head = tl.program_id(0) % num_kv_heads
    tile = tl.program_id(1)
    ints = table + (row // rows) * ROW_INTS
    ends, shifts = _reads(ints)
    num_retained = ends[4]

    # Queries: [NUM_QUERIES, WIDTH]
    index = tile * NUM_QUERIES + tl.arange(0, NUM_QUERIES)
    is_query = index < group * num_tokens
    token, query_head = index // group, head * group + index % group
    dims = tl.arange(0, WIDTH)
    is_dim = dims < HEAD_DIM
    wide_row = row.to(tl.int64)
    at = wide_row * q_strides[0] + query_head * q_strides[1] + token * q_strides[2]
    queries = tl.load(
        q + at[:, None] + dims[None, :] * q_strides[3],
        mask=is_query[:, None] & is_dim[None, :],
        other=0.0,
    ).to(OPERAND)
    bias_rows = None
    if rel_bias is not None:
        at = wide_row * bias_strides[0] + query_head * bias_strides[1] + token * bias_strides[2]
        bias_rows = rel_bias + at + (num_tokens - 1) * bias_strides[3]

    # The keys that any of these queries sees.
    first, own_first, own_end = 0, 0, num_tokens
    if query_window is not None:
        first_token = tile * NUM_QUERIES // group
        last_token = ((tile + 1) * NUM_QUERIES - 1) // group
        first = tl.minimum(tl.maximum(num_retained + first_token - query_window, 0), num_retained)
        own_first = tl.maximum(first_token - query_window, 0)
        own_end = tl.minimum(last_token + 1, num_tokens)
    end = num_retained
    if SPLIT:
        num_splits = tl.num_programs(2)
        run = tl.cdiv(tl.cdiv(num_retained - first, NUM_KEYS), num_splits) * NUM_KEYS
        first = first + tl.program_id(2) * run
        end = tl.minimum(first + run, num_retained)
        if tl.program_id(2) < num_splits - 1:  # the last also takes the step's own
            own_end = own_first

    top = tl.full([NUM_QUERIES], float("-inf"), SUM)
    total = tl.zeros([NUM_QUERIES], SUM)
    result = tl.zeros([NUM_QUERIES, WIDTH], SUM)

    slot = tl.load(ints).to(tl.int64)
    source = tl.load(ints + 1).to(tl.int64)
    segment, of_segment = wide_row // rows, wide_row % rows
    slot_base = _storage(slots, slot_strides, slot, of_segment, head)
    source_base = _storage(sources, source_strides, source, of_segment, head)
    row_source_base = _storage(row_sources, row_source_strides, segment, of_segment, head)
    for begin in range(first, end, NUM_KEYS):
        order = begin + tl.arange(0, NUM_KEYS)
        is_key = order < end
        in_source = (order < ends[0]) | ((order >= ends[1]) & (order < ends[2]))
        entry = order + tl.where(
            order < ends[1],
            tl.where(order < ends[0], shifts[0], shifts[1]),
            tl.where(order < ends[2], shifts[2], tl.where(order < ends[3], shifts[3], shifts[4])),
        )
        if ONE_DTYPE:
            places = slot_base + entry.to(tl.int64) * slot_strides[3]
            if sources is not None:
                from_shared = source_base + entry.to(tl.int64) * source_strides[3]
                places = tl.where(in_source & (source >= 0), from_shared, places)
            if row_sources is not None:
                from_own = row_source_base + entry.to(tl.int64) * row_source_strides[3]
                places = tl.where(in_source & (source < 0), from_own, places)
            keys, values = _pair(places, is_key, dims, is_dim, HEAD_DIM, OPERAND)
        else:
            places = slot_base + entry.to(tl.int64) * slot_strides[3]
            keys, values = _pair(places, is_key & (in_source == 0), dims, is_dim, HEAD_DIM, OPERAND)
            if sources is not None:
                places = source_base + entry.to(tl.int64) * source_strides[3]
                here = is_key & in_source & (source >= 0)
                more_keys, more_values = _pair(places, here, dims, is_dim, HEAD_DIM, OPERAND)
                keys += more_keys
                values += more_values
            if row_sources is not None:
                places = row_source_base + entry.to(tl.int64) * row_source_strides[3]
                here = is_key & in_source & (source < 0)
                more_keys, more_values = _pair(places, here, dims, is_dim, HEAD_DIM, OPERAND)
                keys += more_keys
                values += more_values
        distance = num_retained + token[:, None] - order[None, :]
        top, total, result = _fold(
            queries,
            keys,
            values,
            distance,
            is_query[:, None] & is_key[None, :],
            bias_rows,
            bias_strides,
            query_window,
            top,
            total,
            result,
            SCALE,
            OPERAND,
            SUM,
        )

    k_base = k + wide_row * k_strides[0] + head * k_strides[1]
    v_base = v + wide_row * v_strides[0] + head * v_strides[1]
    for begin in range(own_first, own_end, NUM_KEYS):
        order = begin + tl.arange(0, NUM_KEYS)
        is_key = order < own_end
        mask = is_key[:, None] & is_dim[None, :]
        places = order[:, None] * k_strides[2] + dims[None, :] * k_strides[3]
        keys = tl.load(k_base + places, mask=mask, other=0.0).to(OPERAND)
        places = order[:, None] * v_strides[2] + dims[None, :] * v_strides[3]
        values = tl.load(v_base + places, mask=mask, other=0.0).to(OPERAND)
        distance = token[:, None] - order[None, :]
        top, total, result = _fold(
            queries,
            keys,
            values,
            distance,
            is_query[:, None] & is_key[None, :],
            bias_rows,
            bias_strides,
            query_window,
            top,
            total,
            result,
            SCALE,
            OPERAND,
            SUM,
        )

    if SPLIT:
        at = partial + _program(tl.program_id(2), tl.num_programs(2)) * (NUM_QUERIES * (WIDTH + 2))
        tl.store(at + tl.arange(0, NUM_QUERIES), top)
        tl.store(at + NUM_QUERIES + tl.arange(0, NUM_QUERIES), total)
        at += 2 * NUM_QUERIES
        tl.store(at + tl.arange(0, NUM_QUERIES)[:, None] * WIDTH + dims[None, :], result)
    else:
        at = (wide_row * num_tokens + token) * (num_kv_heads * group) + query_head
        _finish(out, at, result, total, is_query, dims, is_dim, HEAD_DIM)


@triton.jit(do_not_specialize=MERGE_SIZES)
def merge_kernel(
    partial,
    out,
    num_splits,
    num_kv_heads,
    group,
    num_tokens,
    HEAD_DIM: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    SUM: tl.constexpr,
):
    """Add up what the splits of one tile found; the grid is (rows * KV heads, query tiles)."""
    lanes = tl.arange(0, NUM_QUERIES)
    dims = tl.arange(0, WIDTH)
    top = tl.full([NUM_QUERIES], float("-inf"), SUM)
    total = tl.zeros([NUM_QUERIES], SUM)
    result = tl.zeros([NUM_QUERIES, WIDTH], SUM)
    for split in range(num_splits):
        at = partial + _program(split, num_splits) * (NUM_QUERIES * (WIDTH + 2))
        their_top = tl.load(at + lanes)
        new_top = tl.maximum(top, their_top)
        zero_point = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, their_shrink = tl.exp2(top - zero_point), tl.exp2(their_top - zero_point)
        total = total * shrink + tl.load(at + NUM_QUERIES + lanes) * their_shrink
        theirs = tl.load(at + 2 * NUM_QUERIES + lanes[:, None] * WIDTH + dims[None, :])
        result = result * shrink[:, None] + theirs * their_shrink[:, None]
        top = new_top

    row = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    index = tl.program_id(1) * NUM_QUERIES + lanes
    query_head = tl.program_id(0) % num_kv_heads * group + index % group
    at = (row * num_tokens + index // group) * (num_kv_heads * group) + query_head
    is_query = index < group * num_tokens
    _finish(out, at, result, total, is_query, dims, dims < HEAD_DIM, HEAD_DIM)


@triton.jit
def _reads(ints):
    """Of a row's five reads: where each ends in retained order, and what turns order to entry."""
    end_0 = tl.load(ints + 3)
    end_1 = end_0 + tl.load(ints + 5)
    end_2 = end_1 + tl.load(ints + 7)
    end_3 = end_2 + tl.load(ints + 9)
    end_4 = end_3 + tl.load(ints + 11)
    shift_0 = tl.load(ints + 2)
    shift_1 = tl.load(ints + 4) - end_0
    shift_2 = tl.load(ints + 6) - end_1
    shift_3 = tl.load(ints + 8) - end_2
    shift_4 = tl.load(ints + 10) - end_3
    return (end_0, end_1, end_2, end_3, end_4), (shift_0, shift_1, shift_2, shift_3, shift_4)


@triton.jit
def _storage(base, strides, owner, row, head):
    """Where one head of one row begins in slots or sources, `None` if they are not given."""
    if base is not None:
        return base + owner * strides[0] + row * strides[1] + head * strides[2]
    else:
        return None


@triton.jit
def _pair(at, is_key, dims, is_dim, HEAD_DIM: tl.constexpr, OPERAND: tl.constexpr):
    """Keys and values `[NUM_KEYS, WIDTH]` of the entries that begin at `at`; zeros elsewhere."""
    at = at[:, None] + dims[None, :]
    mask = is_key[:, None] & is_dim[None, :]
    keys = tl.load(at, mask=mask, other=0.0).to(OPERAND)
    values = tl.load(at + HEAD_DIM, mask=mask, other=0.0).to(OPERAND)
    return keys, values


@triton.jit
def _fold(
    queries,
    keys,
    values,
    distance,
    is_seen,
    bias_rows,
    bias_strides,
    query_window,
    top,
    total,
    result,
    SCALE: tl.constexpr,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
):
    """One tile of keys into a running softmax: its largest score, its sum, the weighted values."""
    if query_window is not None:
        is_seen = is_seen & (distance >= 0) & (distance <= query_window)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee", out_dtype=SUM)
    if bias_rows is not None:
        bias = tl.load(bias_rows[:, None] + distance * bias_strides[3], mask=is_seen, other=0.0)
        scores += bias.to(SUM)
    scores = tl.where(is_seen, scores * SCALE, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A query that has seen no key yet: its weights are to be 0, not NaN.
    zero_point = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - zero_point[:, None])
    shrink = tl.exp2(top - zero_point)
    total = total * shrink + tl.sum(weights, 1)
    weighted = tl.dot(weights.to(OPERAND), values, input_precision="ieee", out_dtype=SUM)
    return new_top, total, result * shrink[:, None] + weighted


@triton.jit
def _program(split, num_splits):
    """The number of a program among all of the grid, by its split."""
    tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return tile * num_splits + split


@triton.jit
def _finish(out, at, result, total, is_query, dims, is_dim, HEAD_DIM: tl.constexpr):
    """Divide by the sum and write the queries' rows of `out`, the `at`-th each."""
    # Lanes that are no query have seen nothing.
    result = result / tl.where(is_query, total, 1.0)[:, None]
    tl.store(
        out + at[:, None] * HEAD_DIM + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=is_query[:, None] & is_dim[None, :],
    )
