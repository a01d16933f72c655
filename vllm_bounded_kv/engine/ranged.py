"""Attention of a row that takes several tokens and wraps, on CPU.

vLLM's CPU kernel takes no mask, so such a row unpacks its retained entries and runs torch's SDPA.
Its queries are cut into tiles, each over the keys that some query of the tile sees: a prefill of
any length costs what its window costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from vllm_bounded_kv.engine.plan import RangedRow
from vllm_bounded_kv.engine.rotary import Rotary, Rotation
from vllm_bounded_kv.engine.rows import Ints

TILE = 128
"""Queries a tile. Of 64 to 512, the best or near it for windows of 252 to 2,044 (2,048 queries,
head size 64): larger ones read keys that most of their queries do not see."""


@dataclass(frozen=True)
class Tile:
    """Queries `queries` of a row attend keys `[0, sink)` and `window`, under `mask`."""

    queries: slice
    sink: int
    window: slice
    mask: torch.Tensor
    """`[group * tile, sink + window]`, 0 or -inf, in the model's dtype."""
    turn: Rotation | None = None
    """Of the window's keys, where the queries' rotary position has fallen back since."""


@dataclass(frozen=True)
class RangedAttention:
    """One ranged row, ready for every layer of the step."""

    tokens: slice
    slots: torch.Tensor
    """`[m]` int64 cache slots of the retained entries, in stream order."""
    tiles: list[Tile]


def prepare(
    row: RangedRow, group: int, dtype: torch.dtype, rotary: Rotary | None = None
) -> RangedAttention:
    """Cut a row into tiles and build their masks.

    Args:
        row: the row, as planned.
        group: query heads per KV head; their queries are folded into one.
        dtype: the queries' dtype.
        rotary: of the model, for rows whose positions fall back in mid-step.
    """
    keys = row.positions
    num_tokens = row.tokens.stop - row.tokens.start
    first = int(keys[-1]) + 1 - num_tokens
    own = slice(len(keys) - num_tokens, None)
    num_sink = int(np.searchsorted(keys, row.sink))
    tiles = []
    for start, stop in _cuts(num_tokens, None if row.fallbacks is None else row.fallbacks[own]):
        queries = np.arange(first + start, first + stop)
        lo = max(num_sink, int(np.searchsorted(keys, queries[0] - row.ring + 1)))
        hi = max(num_sink, int(np.searchsorted(keys, queries[-1], side="right")))
        seen = np.concatenate([keys[:num_sink], keys[lo:hi]])
        age = queries[:, None] - seen[None, :]
        allowed = (age >= 0) & ((age < row.ring) | (seen < row.sink))
        mask = torch.zeros(allowed.shape, dtype=dtype)
        mask.masked_fill_(torch.from_numpy(~allowed), float("-inf"))
        turn = None
        if row.fallbacks is not None:
            assert rotary is not None
            missing = row.fallbacks[own][start] - row.fallbacks[lo:hi]
            if missing.any():
                turn = rotary.rotation(-missing * row.period)
        window = slice(lo, hi)
        tiles.append(Tile(slice(start, stop), num_sink, window, mask.repeat(group, 1), turn))
    return RangedAttention(row.tokens, torch.from_numpy(row.slots), tiles)


def _cuts(num_tokens: int, fallbacks: Ints | None) -> Iterator[tuple[int, int]]:
    """Ranges of queries: at most `TILE` of them, all between the same two fallbacks."""
    ends = [num_tokens]
    if fallbacks is not None:
        ends = [*(np.flatnonzero(np.diff(fallbacks)) + 1).tolist(), num_tokens]
    start = 0
    for end in ends:
        for tile in range(start, end, TILE):
            yield tile, min(tile + TILE, end)
        start = end


def attend(
    row: RangedAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    scale: float,
) -> None:
    """Attend and write the result.

    Args:
        row: the row, prepared.
        query: `[T, H, D]` the row's own queries.
        key: `[m + T, H_kv, D]` retained keys, then the row's own.
        value: as `key`.
        output: `[T, H, D]` written in place.
        scale: of the logits.
    """
    num_kv_heads, head_dim = key.shape[1], key.shape[2]
    keys, values = key.transpose(0, 1), value.transpose(0, 1)
    for tile in row.tiles:
        size = tile.queries.stop - tile.queries.start
        # [T, H_kv, group, D] -> [H_kv, group * T, D]: query heads of one KV head side by side
        q = query[tile.queries].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        q = q.reshape(num_kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(
            q[None],
            _seen(keys, tile, tile.turn)[None],
            _seen(values, tile)[None],
            attn_mask=tile.mask,
            scale=scale,
        )[0]
        out = out.unflatten(1, (-1, size)).permute(2, 0, 1, 3)
        output[tile.queries] = out.flatten(1, 2)


def _seen(entries: torch.Tensor, tile: Tile, turn: Rotation | None = None) -> torch.Tensor:
    window = entries[:, tile.window]
    if turn is not None:
        window = turn(window)
    return torch.cat([entries[:, : tile.sink], window], dim=1) if tile.sink else window
