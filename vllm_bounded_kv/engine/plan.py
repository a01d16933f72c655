"""What one engine step writes and reads, for a whole batch, in NumPy.

The vectorised twin of `layout.py`'s compact index. It turns the runner's view of a batch (block
rows, query starts, stream lengths) into what the kernels need, once per step; all layers share
it. No loop over tokens or one-token rows: only rows that take several tokens *and* wrap (part of
a long prefill) are visited one by one, for they need attention of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_bounded_kv.engine.header import HEADER_LEN, RING, SINK

Ints = NDArray[np.int64]
NO_SLOT = -1


@dataclass(frozen=True)
class RangedRow:
    """A row of several tokens that wraps: it reads what it retains before it overwrites it.

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


@dataclass(frozen=True)
class StepPlan:
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


def plan_step(
    table: NDArray[np.int32],
    query_start: NDArray[np.int32],
    stream_lens: NDArray[np.int32],
    num_tokens: int,
    block_size: int,
) -> StepPlan:
    """Plan one step.

    Args:
        table: `[B, HEADER_LEN + blocks]` block rows, header first.
        query_start: `[B + 1]` first token of each row.
        stream_lens: `[B]` entries of each stream after the step.
        num_tokens: tokens of the batch, padding included; padded tokens write nothing.
        block_size: entries per block.
    """
    num_rows = len(stream_lens)
    blocks = table[:num_rows, HEADER_LEN:]
    sink = table[:num_rows, SINK].astype(np.int64)
    ring = table[:num_rows, RING].astype(np.int64)
    # A row of zeros is vLLM's padding: give it a ring so large that it never wraps.
    ring[ring == 0] = np.iinfo(np.int32).max
    capacity = sink + ring
    after = stream_lens.astype(np.int64)
    query_lens = np.diff(query_start).astype(np.int64)
    before = after - query_lens
    is_ranged = (after > capacity) & (query_lens > 1)

    rows = np.repeat(np.arange(num_rows), query_lens)
    positions = np.arange(len(rows)) - np.repeat(query_start[:-1] - before, query_lens)
    compact = np.where(
        positions < capacity[rows],
        positions,
        sink[rows] + (positions - sink[rows]) % ring[rows],
    )
    slots = blocks[rows, compact // block_size].astype(np.int64) * block_size
    slots += compact % block_size

    slot_mapping = np.full(num_tokens, NO_SLOT, dtype=np.int64)
    if is_ranged.any():
        overwrites = is_ranged[rows] & (positions >= capacity[rows])
        survives = positions >= (after - ring)[rows]  # the last writer of its entry
        late_tokens = np.flatnonzero(overwrites & survives)
        slot_mapping[: len(rows)] = np.where(overwrites, NO_SLOT, slots)
    else:
        late_tokens = np.empty(0, dtype=np.int64)
        slot_mapping[: len(rows)] = slots

    seq_lens = np.minimum(after, capacity)
    last_block = (seq_lens - 1) // block_size
    last_block_before = (np.minimum(before, capacity) - 1) // block_size
    is_new = (last_block > last_block_before) & (seq_lens % block_size != 0)
    return StepPlan(
        seq_lens=seq_lens.astype(np.int32),
        slot_mapping=slot_mapping,
        late_tokens=late_tokens,
        late_slots=slots[late_tokens],
        new_partial_blocks=blocks[is_new, last_block[is_new]].astype(np.int64),
        ranged=[
            _ranged_row(
                blocks[row],
                slice(int(query_start[row]), int(query_start[row + 1])),
                int(before[row]),
                int(sink[row]),
                int(ring[row]),
                block_size,
            )
            for row in np.flatnonzero(is_ranged)
        ],
        stock_rows=~is_ranged,
    )


def _ranged_row(
    blocks: NDArray[np.int32],
    tokens: slice,
    before: int,
    sink: int,
    ring: int,
    block_size: int,
) -> RangedRow:
    # The first query stands at `before` and sees back to `before - ring + 1`.
    retained = np.concatenate(
        [
            np.arange(min(sink, before), dtype=np.int64),
            np.arange(max(sink, before - ring + 1), max(sink, before), dtype=np.int64),
        ]
    )
    compact = np.where(retained < sink + ring, retained, sink + (retained - sink) % ring)
    slots = blocks[compact // block_size].astype(np.int64) * block_size + compact % block_size
    own = np.arange(before, before + tokens.stop - tokens.start, dtype=np.int64)
    return RangedRow(tokens, slots, np.concatenate([retained, own]), sink, ring)
