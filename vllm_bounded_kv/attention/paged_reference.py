"""The paged kernels one query and one key at a time, in float64: what the fast ones must equal.

Waits for the device at every step; for tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_bounded_kv.attention.paged import Turns
from vllm_bounded_kv.layout import attends, compact_index, position_at_entry
from vllm_bounded_kv.positions import num_fallbacks

RADIANS = 2 * torch.pi / 2**64


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
) -> Tensor:
    """See `paged.Attend`."""
    out = torch.zeros_like(query) if out is None else out
    group = query.shape[1] // key.shape[1]
    for row, blocks in zip(table.tolist(), block_table.tolist(), strict=True):
        first, length, before, sink, ring, limit = row
        capacity = sink + ring

        def entry(p: int, own: Tensor, cache: Tensor) -> Tensor:
            if p >= before:  # noqa: B023 - called within the iteration
                return own[first + p - before].double()  # noqa: B023
            return cache[_place(blocks, compact_index(p, sink, ring), cache)].double()  # noqa: B023

        for t in range(length):
            p = before + t
            seen = [k for k in range(p + 1) if attends(p, k, sink, ring)]
            keys = torch.stack([entry(k, key, key_cache) for k in seen])
            values = torch.stack([entry(k, value, value_cache) for k in seen])
            if turns is not None:
                fallen = num_fallbacks(p, capacity, limit)
                missing = [
                    0 if k < sink else fallen - num_fallbacks(max(k, before), capacity, limit)
                    for k in seen
                ]
                by = -torch.tensor(missing) * (limit - capacity)
                keys = turned(keys.transpose(0, 1), by, turns).transpose(0, 1)
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
            scores = torch.einsum("hd,khd->hk", query[first + t].double(), keys) * scale
            out[first + t] = torch.einsum("hk,khd->hd", scores.softmax(-1), values).to(out.dtype)
    return out


def store(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """See `paged.Store`."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[divmod(slot, block_size)] = key[token]
            value_cache[divmod(slot, block_size)] = value[token]


def turn_first(key_cache: Tensor, table: Tensor, block_table: Tensor, turns: Turns) -> None:
    """See `paged.Turn`."""

    def fallbacks(row: list[int], entry: int) -> int:
        _, _, before, sink, ring, limit = row
        return num_fallbacks(before, sink + ring, limit) - num_fallbacks(
            before - 1, sink + ring, limit
        )

    _turn(key_cache, table, block_table, turns, fallbacks)


def turn_last(key_cache: Tensor, table: Tensor, block_table: Tensor, turns: Turns) -> None:
    """See `paged.Turn`."""

    def fallbacks(row: list[int], entry: int) -> int:
        _, length, before, sink, ring, limit = row
        last = before + length - 1
        if last < limit:
            return 0
        position = position_at_entry(entry, last + 1, sink, ring)
        # What was there before the step has been turned to the step's first token.
        fallen = num_fallbacks(max(position, before), sink + ring, limit)
        return num_fallbacks(last, sink + ring, limit) - fallen

    _turn(key_cache, table, block_table, turns, fallbacks)


def _turn(
    key_cache: Tensor,
    table: Tensor,
    block_table: Tensor,
    turns: Turns,
    fallbacks: Callable[[list[int], int], int],
) -> None:
    for row, blocks in zip(table.tolist(), block_table.tolist(), strict=True):
        _, length, _, sink, ring, limit = row
        for entry in range(sink, sink + ring) if length else ():
            times = fallbacks(row, entry)
            if times:
                place = _place(blocks, entry, key_cache)
                by = torch.tensor([-times * (limit - sink - ring)])
                keys = key_cache[place].double()[:, None]
                key_cache[place] = turned(keys, by, turns)[:, 0].to(key_cache.dtype)


def _place(blocks: list[int], entry: int, cache: Tensor) -> tuple[int, int]:
    block, offset = divmod(entry, cache.shape[1])
    return blocks[block], offset


def turned(keys: Tensor, by: Tensor, turns: Turns) -> Tensor:
    """Keys `[..., n, D]`, each turned by one of `by [n]` positions."""
    angles = (by[:, None] * turns.turns).to(keys.dtype) * RADIANS  # the product drops full turns
    cos, sin = angles.cos(), angles.sin()
    half = turns.rotary_dim // 2
    if turns.is_neox:
        a, b = slice(0, half), slice(half, 2 * half)
    else:
        a, b = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    out = keys.clone()
    out[..., a] = keys[..., a] * cos - keys[..., b] * sin
    out[..., b] = keys[..., b] * cos + keys[..., a] * sin
    return out
