"""A step over paged streams, made up at random, with all that was ever written beside it.

Independent of what it judges: masks, compact indices and rotary positions are spelled out here
from their definitions, rotations are complex numbers in float64, and every stream is a list that
only grows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Stream:
    """One row. `ring` 0: padding."""

    sink: int
    ring: int
    before: int
    length: int
    blocks: list[int]
    keys: Tensor
    """`[before + length, H_kv, D]` as they were written, rotated to their `v`, in the dtype."""
    values: Tensor

    @property
    def after(self) -> int:
        return self.before + self.length

    def rotary(self, p: int, limit: int | None) -> int:
        capacity = self.sink + self.ring
        if limit is None or p < limit:
            return p
        return capacity + (p - capacity) % (limit - capacity)

    def entry(self, p: int) -> int:
        if p < self.sink + self.ring:
            return p
        return self.sink + (p - self.sink) % self.ring

    def held(self, count: int) -> list[int]:
        """Positions that the row holds once `count` are written."""
        return [p for p in range(count) if p < self.sink or p >= count - self.ring]

    def keys_for(self, seen: list[int], p: int, batch: Batch) -> Tensor:
        """`[keys, H_kv, D]` float64: rotated as the query at `p` must find them."""
        keys = self.keys[seen].double()
        if batch.limit is None:
            return keys
        v = self.rotary(p, batch.limit)
        by = [0 if k < self.sink else v - (p - k) - self.rotary(k, batch.limit) for k in seen]
        return batch.rotate(keys, torch.tensor(by, dtype=torch.float64)[:, None, None])


@dataclass
class Batch:
    """A step."""

    streams: list[Stream]
    block_size: int
    num_blocks: int
    num_padded: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    is_head_first: bool
    limit: int | None
    rotary_dim: int
    is_neox: bool
    query: Tensor
    """`[N, H, D]`, padding included."""

    @property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.streams) + self.num_padded

    @property
    def frequencies(self) -> Tensor:
        half = self.rotary_dim // 2
        return 1.0 / 100.0 ** (torch.arange(half, dtype=torch.float64) / half)

    def rotate(self, x: Tensor, by: Tensor) -> Tensor:
        """`[keys, H_kv, D]` float64, by `[keys, 1, 1]` positions."""
        part, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        half = self.rotary_dim // 2
        if self.is_neox:
            pairs = torch.complex(part[..., :half], part[..., half:])
        else:
            pairs = torch.view_as_complex(part.unflatten(-1, (half, 2)).contiguous())
        pairs = pairs * torch.exp(1j * by * self.frequencies)
        if self.is_neox:
            return torch.cat([pairs.real, pairs.imag, rest], -1)
        return torch.cat([torch.view_as_real(pairs).flatten(-2), rest], -1)

    def own(self, name: str) -> Tensor:
        """`[N, H_kv, D]` the step's own keys or values; padding is NaN."""
        parts = [getattr(s, name)[s.before :] for s in self.streams]
        shape = (self.num_padded, self.kv_heads, self.head_dim)
        return torch.cat([*parts, torch.full(shape, torch.nan, dtype=self.dtype)])

    def empty_cache(self) -> tuple[Tensor, Tensor]:
        """Keys and values full of NaN, as vLLM's backends see them."""
        shape = (self.num_blocks, self.kv_heads, self.block_size, 2 * self.head_dim)
        if self.is_head_first:
            cache = torch.full(shape, torch.nan, dtype=self.dtype)
        else:
            n, h, b, d = shape
            cache = torch.full((n, b, h, d), torch.nan, dtype=self.dtype).transpose(1, 2)
        keys, values = cache.transpose(1, 2).split(self.head_dim, dim=-1)
        return keys, values

    def place(self, s: Stream, p: int) -> tuple[int, int]:
        block, offset = divmod(s.entry(p), self.block_size)
        return s.blocks[block], offset

    def cache_before(self, is_turned: bool) -> tuple[Tensor, Tensor]:
        """What the cache holds before the step, or once its first tokens' turns are done."""
        keys, values = self.empty_cache()
        for s in self.streams:
            last = s.before if is_turned and s.length else s.before - 1
            self.put(s, keys, values, s.before, last)
        return keys, values

    def put(self, s: Stream, keys: Tensor, values: Tensor, count: int, last: int) -> None:
        """What a row holds once `count` are written, turned to its position `last`."""
        held = s.held(count)
        if held:
            at = tuple(torch.tensor([self.place(s, p) for p in held]).T)
            keys[at] = s.keys_for(held, last, self).to(self.dtype)
            values[at] = s.values[held]

    def ints(self) -> dict[str, Tensor]:
        """The runner's view."""
        width = max(len(s.blocks) for s in self.streams) + 1
        junk = 2**31 - 1  # never to be looked at
        return {
            "sink": torch.tensor([s.sink for s in self.streams], dtype=torch.int32),
            "ring": torch.tensor([s.ring for s in self.streams], dtype=torch.int32),
            "block_table": torch.tensor(
                [[*s.blocks, *[junk] * (width - len(s.blocks))] for s in self.streams],
                dtype=torch.int32,
            ),
            "query_start": torch.tensor(
                [sum(s.length for s in self.streams[:i]) for i in range(len(self.streams) + 1)],
                dtype=torch.int32,
            ),
            "stream_lens": torch.tensor([s.after for s in self.streams], dtype=torch.int32),
        }

    def attention(self, scale: float) -> Tensor:
        """`[N - padding, H, D]` float64, one query at a time."""
        rows = []
        for s in self.streams:
            for p in range(s.before, s.after):
                q = self.query[len(rows)].double().unflatten(0, (self.kv_heads, self.group))
                seen = [k for k in range(p + 1) if k < s.sink or p - s.ring < k]
                k = s.keys_for(seen, p, self)
                weights = (torch.einsum("hgd,khd->hgk", q, k) * scale).softmax(-1)
                rows.append(torch.einsum("hgk,khd->hgd", weights, s.values[seen].double()))
        shape = (len(rows), self.kv_heads * self.group, self.head_dim)
        return torch.stack(rows).reshape(shape) if rows else torch.empty(shape)


def a_batch(seed: int, *, rebases: bool | None = None) -> Batch:
    """A random step, small, drawn towards borders: sinks, wraps, and limits of positions."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    block_size = chance.choice([4, 8, 16, 32])
    head_dim = chance.choice([16, 16, 32, 64, 80])
    kv_heads, group = chance.choice([(1, 1), (1, 2), (2, 1), (1, 3), (2, 2)])
    dtype = chance.choice(DTYPES)
    rebases = chance.random() < 0.6 if rebases is None else rebases
    shapes = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        sink = chance.choice([0, 0, 1, 4, block_size, chance.randint(0, 2 * block_size + 3)])
        shapes.append((sink, chance.choice([1, 2, 5, 16, chance.randint(1, 30)])))
    limit = max(s + r for s, r in shapes) + chance.choice([1, 2, 5, 17, 60]) if rebases else None
    deck = list(range(1, 200))
    chance.shuffle(deck)
    rotary_dim = chance.choice([head_dim, head_dim // 2, 6])
    sizes = []
    for sink, ring in shapes:
        capacity = sink + ring
        borders = [0, sink, capacity, chance.randint(0, 3 * capacity)]
        if limit is not None:
            borders += [limit, limit, limit + chance.randint(1, 3) * (limit - capacity)]
        before = max(0, chance.choice(borders) + chance.randint(-2, 1))
        length = chance.choice([0, 1, 2, chance.randint(1, 12), chance.randint(1, 30)])
        sizes.append((before, length))
    if chance.random() < 0.1:  # vLLM's padding: a row of zeros, without tokens
        shapes.append((0, 0))
        sizes.append((0, 0))
    streams = []
    for (sink, ring), (before, length) in zip(shapes, sizes, strict=True):
        blocks = [deck.pop() for _ in range(-(-(sink + ring) // block_size))]
        shape = (2, before + length, kv_heads, head_dim)
        keys, values = torch.randn(shape, generator=generator).to(dtype)
        streams.append(Stream(sink, ring, before, length, blocks, keys, values))
    num_padded = chance.choice([0, 0, 3])
    num_tokens = sum(length for _, length in sizes) + num_padded
    query = torch.randn(num_tokens, kv_heads * group, head_dim, generator=generator).to(dtype)
    return Batch(
        streams,
        block_size,
        200,
        num_padded,
        kv_heads,
        group,
        head_dim,
        dtype,
        chance.random() < 0.5,
        limit,
        rotary_dim,
        chance.random() < 0.5,
        query,
    )
