"""The runner's view of a batch, read in terms of streams: whose rows, from where to where."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_bounded_kv.engine.header import HEADER_LEN, RING, SINK

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """`B` rows of a step. Stream positions, int64, unless it says otherwise."""

    blocks: NDArray[np.int32]
    """`[B, blocks]` blocks of each slot."""
    sink: Ints
    """`[B]`"""
    ring: Ints
    """`[B]` entries of the ring that a query sees."""
    capacity: Ints
    """`[B]` sink + ring."""
    stored_ring: Ints
    """`[B]` entries that the ring has in the slot: those, and the spare ones."""
    before: Ints
    """`[B]` entries of each stream before the step."""
    after: Ints
    """`[B]` and after it."""
    start: Ints
    """`[B]` first token of each row within the batch."""
    block_size: int

    @classmethod
    def read(
        cls,
        table: NDArray[np.int32],
        query_start: NDArray[np.int32],
        stream_lens: NDArray[np.int32],
        block_size: int,
        spare: int = 0,
    ) -> Rows:
        """Arguments as for `plan.plan_step`."""
        num_rows = len(stream_lens)
        sink = table[:num_rows, SINK].astype(np.int64)
        ring = table[:num_rows, RING].astype(np.int64)
        # A row of zeros is vLLM's padding: give it a ring so large that it never wraps.
        ring[ring == 0] = np.iinfo(np.int32).max
        after = stream_lens.astype(np.int64)
        start = query_start.astype(np.int64)
        return cls(
            blocks=table[:num_rows, HEADER_LEN:],
            sink=sink,
            ring=ring,
            capacity=sink + ring,
            stored_ring=ring + spare,
            before=after - np.diff(start),
            after=after,
            start=start[:-1],
            block_size=block_size,
        )

    def compact(self, rows: Ints, positions: Ints) -> Ints:
        """Compact index of a stream position of each row in `rows`."""
        sink, ring = self.sink[rows], self.stored_ring[rows]
        return np.where(positions < sink + ring, positions, sink + (positions - sink) % ring)

    def slots(self, rows: Ints, compact: Ints) -> Ints:
        """Cache slot of a compact index of each row in `rows`."""
        block = self.blocks[rows, compact // self.block_size].astype(np.int64)
        return block * self.block_size + compact % self.block_size
