"""Paged attention over bounded streams: what its kernels are given, and what they promise.

Where `attention` serves a slot pool, this serves a paged cache: a request's sink and ring lie one
after the other in a fixed row of blocks, stream position `p` at its compact index (`layout`). The
query at `p` attends `[0, sink)` and `(p - ring, p]`: the step's own keys from the step's tensors,
everything before it from the cache. So a row of several tokens may wrap, any number of times.

The order of one layer's step, which sharing depends on (see `engine.backend`): `turn_first`,
`store` what destroys nothing, `attend`, `store` what overwrites ring entries, `turn_last`.

Invariants: nothing is copied to the host; each row is read from `[B, COLUMNS]` ints on the device
(`paged_plan`); a row with `LENGTH` 0 reads and writes nothing; entries that a row does not hold,
and block ids beyond its blocks, are never looked at, NaN included. Imports no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FIRST, LENGTH, BEFORE, SINK, RING, LIMIT = range(6)
"""Of a row of the table, int32: its first token in the batch (never less than the row's before
it), its tokens, entries of its stream before the step, sink, ring, and the position limit."""
COLUMNS = 6
NO_LIMIT = 2**31 - 1
"""The limit of streams whose rotary positions never fall back."""
NO_SLOT = -1


@dataclass(frozen=True)
class Turns:
    """A rotary embedding's frequencies as binary fractions of a full turn.

    `n * turns` overflows exactly once per full turn, so what is left is the angle of `n` positions
    without its full turns, right to 2^-32 of one for any `n`. The same product in float32 is off by
    8e-3 at 131,072 positions, and many GPUs are slow at float64.
    """

    turns: Tensor
    """`[rotary_dim / 2]` int64: 2^-64 of a turn a position, modulo 1."""
    is_neox: bool
    """Pairs are `(i, i + half)`; otherwise `(2i, 2i + 1)`."""

    @classmethod
    def of(cls, frequencies: NDArray[np.float64], is_neox: bool, device: torch.device) -> Turns:
        """From `[rotary_dim / 2]` radians a position."""
        turns = (frequencies / (2 * np.pi)) % 1.0
        # 2^32 steps, then what is left in another 2^32: a double's 53 bits survive both.
        high = np.floor(np.ldexp(turns, 32))
        low = np.floor(np.ldexp(np.ldexp(turns, 32) - high, 32))
        binary = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
        return cls(torch.from_numpy(binary.view(np.int64)).to(device), is_neox)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that turn."""
        return 2 * len(self.turns)


class Attend(Protocol):
    """Attention of one layer of one step; changes nothing but `out`.

    Scores and sums are in float32 at least. The step's own keys are rotated by their own rotary
    positions, cached ones in the ring as if written in the period of the row's first token. Where
    a row crosses into later periods, both are brought to the query's period in float32 and rounded
    to their dtype once more.
    """

    def __call__(
        self,
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
    ) -> Tensor:
        """Attend.

        Args:
            query: `[N, H, D]`, rotated, `H` a multiple of `H_kv`.
            key, value: `[N, H_kv, D]`, of the step's own tokens.
            key_cache, value_cache: `[num_blocks, block_size, H_kv, D]`, any strides but 1 for `D`.
            table: `[B, COLUMNS]` int32.
            block_table: `[B, max_blocks]` int32, blocks of each row.
            scale: of the scores.
            turns: of the model, where rows may cross their position limits; `None`: none does.
            out: `[N, H, D]`; tokens of no row are left as they are. `None`: a new one of zeros.

        Returns:
            `[N, H, D]`, `out` if given.
        """
        ...


class Store(Protocol):
    """Write tokens to their slots, bit by bit; changes the caches only."""

    def __call__(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Store.

        Args:
            key, value: `[N, H_kv, D]`.
            key_cache, value_cache: as for `Attend`.
            slots: `[N]` int64 slots, all different, or `NO_SLOT`: that token writes nothing.
        """
        ...


class Turn(Protocol):
    """Turn cached keys in place, each at most once; changes ring entries of `key_cache` only.

    First: rings of rows whose first token begins a period, back by one period. Last: what rows
    that run into further periods leave behind, up to the period of their last token.
    """

    def __call__(self, key_cache: Tensor, table: Tensor, block_table: Tensor, turns: Turns) -> None:
        """Arguments as for `Attend`."""
        ...
