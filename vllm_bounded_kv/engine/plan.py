"""What one engine step writes and reads, for a whole batch, in NumPy.

The vectorised twin of `layout.py`'s compact index. It turns the runner's view of a batch (block
rows, query starts, stream lengths) into what the kernels need, once per step; all layers share
it. No loop over tokens or one-token rows: only rows that take several tokens *and* wrap (part of
a long prefill) are visited one by one, for they need attention of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_bounded_kv.engine.rebase import Rebase, num_fallbacks, plan_rebase
from vllm_bounded_kv.engine.rows import Ints, Rows

NO_SLOT = -1


@dataclass(frozen=True)
class RangedRow:
    """A row that vLLM's kernel cannot serve: of several tokens that wrap, so that it must read
    what it retains before it overwrites it; or of any that wrap, where the ring has spare entries,
    which the kernel would see.

    Keys, in stream order, are the retained entries, read from `slots`, then the step's own.
    """

    tokens: slice
    """The step's own tokens, as a range of the batch."""
    slots: Ints
    """`[m]` cache slots of the retained entries."""
    positions: Ints
    """`[m + T]` stream positions of all keys, ascending."""
    sink: int
    ring: int
    fallbacks: Ints | None = None
    """`[m + T]` how often the position that each key is rotated by has fallen back; `None` where
    that is the same for all."""
    period: int = 0
    """By how much rotary positions fall back."""


@dataclass(frozen=True)
class EnginePlan:
    """One step of a batch of `B` rows and `N` tokens."""

    seq_lens: NDArray[np.int32]
    """`[B]` valid compact entries once the step is written: what a stock kernel takes for the
    sequence length."""
    slot_mapping: Ints
    """`[N]` cache slot of each token that is written *before* attention; -1 writes nothing."""
    late_tokens: Ints
    """Tokens written *after* attention: they overwrite entries that the step still reads."""
    late_slots: Ints
    """Their cache slots."""
    new_partial_blocks: Ints
    """Blocks that this step leaves partly filled for the first time. Kernels multiply the
    unwritten tail of their values by zero, so an earlier owner's NaN must be cleared."""
    ranged: list[RangedRow]
    stock_rows: NDArray[np.bool_]
    """`[B]` rows that vLLM's own kernel serves."""
    rebase: Rebase | None
    """Rotary positions, where they are not the stream's own."""


def plan_step(
    table: NDArray[np.int32],
    query_start: NDArray[np.int32],
    stream_lens: NDArray[np.int32],
    num_tokens: int,
    block_size: int,
    position_limit: int | None = None,
    spare: int = 0,
) -> EnginePlan:
    """Plan one step.

    Args:
        table: `[B, HEADER_LEN + blocks]` block rows, header first.
        query_start: `[B + 1]` first token of each row.
        stream_lens: `[B]` entries of each stream after the step.
        num_tokens: tokens of the batch, padding included; padded tokens write nothing.
        block_size: entries per block.
        position_limit: where rotary positions fall back (see `positions`); `None`: nowhere.
        spare: entries that each ring has beside those that queries see.
    """
    rows = Rows.read(table, query_start, stream_lens, block_size, spare)
    capacity, before, after = rows.capacity, rows.before, rows.after
    query_lens = after - before
    is_ranged = (after > capacity) & (query_lens > (0 if spare else 1))

    token_rows = np.repeat(np.arange(len(after)), query_lens)
    positions = np.arange(len(token_rows)) - np.repeat(rows.start - before, query_lens)
    slots = rows.slots(token_rows, rows.compact(token_rows, positions))

    slot_mapping = np.full(num_tokens, NO_SLOT, dtype=np.int64)
    if is_ranged.any():
        overwrites = is_ranged[token_rows] & (
            positions >= (rows.sink + rows.stored_ring)[token_rows]
        )
        survives = positions >= (after - rows.stored_ring)[token_rows]  # last writer of its entry
        late_tokens = np.flatnonzero(overwrites & survives)
        slot_mapping[: len(slots)] = np.where(overwrites, NO_SLOT, slots)
    else:
        late_tokens = np.empty(0, dtype=np.int64)
        slot_mapping[: len(slots)] = slots

    seq_lens = np.minimum(after, capacity)
    last_block = (seq_lens - 1) // block_size
    last_block_before = (np.minimum(before, capacity) - 1) // block_size
    is_new = (last_block > last_block_before) & (seq_lens % block_size != 0)
    return EnginePlan(
        seq_lens=seq_lens.astype(np.int32),
        slot_mapping=slot_mapping,
        late_tokens=late_tokens,
        late_slots=slots[late_tokens],
        new_partial_blocks=rows.blocks[is_new, last_block[is_new]].astype(np.int64),
        ranged=[_ranged_row(rows, row, position_limit) for row in np.flatnonzero(is_ranged)],
        stock_rows=~is_ranged,
        rebase=(
            None
            if position_limit is None
            else plan_rebase(rows, token_rows, positions, is_ranged, position_limit)
        ),
    )


def _ranged_row(rows: Rows, row: int, position_limit: int | None) -> RangedRow:
    sink, ring, capacity = int(rows.sink[row]), int(rows.ring[row]), rows.capacity[row]
    before, after, start = int(rows.before[row]), int(rows.after[row]), int(rows.start[row])
    # The first query stands at `before` and sees back to `before - ring + 1`.
    retained = np.concatenate(
        [
            np.arange(min(sink, before), dtype=np.int64),
            np.arange(max(sink, before - ring + 1), max(sink, before), dtype=np.int64),
        ]
    )
    which = np.full(len(retained), row)
    own = np.arange(before, after, dtype=np.int64)
    keys = RangedRow(
        tokens=slice(start, start + after - before),
        slots=rows.slots(which, rows.compact(which, retained)),
        positions=np.concatenate([retained, own]),
        sink=sink,
        ring=ring,
    )
    if position_limit is None or after <= position_limit:
        return keys
    # Retained keys have been turned to the step's first token.
    fallbacks = num_fallbacks(np.maximum(keys.positions, before), capacity, position_limit)
    if fallbacks[0] == fallbacks[-1]:
        return keys
    return replace(keys, fallbacks=fallbacks, period=position_limit - int(capacity))
