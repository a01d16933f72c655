"""The ranged kernel against plain masked attention in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_bounded_kv.engine import ranged
from vllm_bounded_kv.engine.plan import RangedRow
from vllm_bounded_kv.layout import attends

KV_HEADS, HEAD_DIM = 2, 16
TOLERANCE = 2e-6
"""fp32 against float64, for unit-normal inputs."""

# sink, ring, entries before the step, tokens of the step
CASES = [
    (0, 1, 5, 9),
    (0, 1, 0, 300),
    (3, 1, 0, 300),
    (5, 50, 20, 300),  # tiles of 128, not wrapped before the step
    (5, 50, 2, 300),  # part of the sink is the step's own
    (40, 50, 10, 129),
    (5, 50, 4000, 127),
    (5, 50, 4000, 257),
    (0, 400, 390, 500),  # tiles of half the ring
    (17, 400, 10_000, 401),
    (9, 1100, 1100, 600),  # the largest tile
    (130, 3, 0, 200),
    (130, 3, 500, 200),
    (4, 7, 12, 2),
]


def a_row(sink: int, ring: int, before: int, num_tokens: int) -> RangedRow:
    kept = [p for p in range(before) if p < sink or p > before - ring]
    positions = np.array([*kept, *range(before, before + num_tokens)], dtype=np.int64)
    slots = np.arange(len(kept), dtype=np.int64)
    return RangedRow(slice(7, 7 + num_tokens), slots, positions, sink, ring)


def masked_attention(
    row: RangedRow, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """`[T, H, D]` in float64, one query head and one mask entry at a time."""
    num_tokens, num_heads, _ = query.shape
    positions = row.positions.tolist()
    allowed = torch.tensor(
        [[attends(q, k, row.sink, row.ring) for k in positions] for q in positions[-num_tokens:]]
    )
    group = num_heads // key.shape[1]
    heads = []
    for head in range(num_heads):
        scores = query[:, head].double() @ key[:, head // group].double().T * scale
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        heads.append(weights @ value[:, head // group].double())
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize(("sink", "ring", "before", "num_tokens"), CASES)
def test_equals_masked_attention(
    sink: int, ring: int, before: int, num_tokens: int, group: int
) -> None:
    row = a_row(sink, ring, before, num_tokens)
    generator = torch.Generator().manual_seed(group)
    query = torch.randn(num_tokens, KV_HEADS * group, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, len(row.positions), KV_HEADS, HEAD_DIM, generator=generator)
    output = torch.full_like(query, torch.nan)
    prepared = ranged.prepare(row, group, torch.float32)
    ranged.attend(prepared, query, key, value, output, scale=0.3)
    assert prepared.tokens == row.tokens
    assert prepared.slots.tolist() == row.slots.tolist()
    expected = masked_attention(row, query, key, value, scale=0.3)
    assert float((output.double() - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("ring", [50, 400, 1000, 4000])
def test_the_tiles_are_cut_and_see_only_what_their_queries_do(ring: int) -> None:
    """A long prefill costs what its window costs, not its square."""
    tiles = ranged.prepare(a_row(5, ring, 5000, 1000), 3, torch.float32).tiles
    sizes = [ranged.TILE] * 7 + [1000 - 7 * ranged.TILE]
    assert [tile.queries.stop - tile.queries.start for tile in tiles] == sizes
    for tile, size in zip(tiles, sizes, strict=True):
        assert tile.sink == 5
        assert tile.window.stop - tile.window.start == size + ring - 1
        assert tile.mask.shape == (3 * size, 5 + size + ring - 1)


def test_a_ring_of_one_returns_the_tokens_own_value() -> None:
    row = a_row(0, 1, 40, 200)
    query = torch.randn(200, KV_HEADS, HEAD_DIM)
    key, value = torch.randn(2, 200, KV_HEADS, HEAD_DIM)
    output = torch.empty_like(query)
    ranged.attend(ranged.prepare(row, 1, torch.float32), query, key, value, output, scale=1.0)
    torch.testing.assert_close(output, value, rtol=0, atol=1e-7)
