"""What a flow-matching decoder relies on: order within a chunk, drafts, steps run again."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from examples.streaming_decoders.explicit import ExplicitCache, no_entries
from examples.streaming_decoders.flow_matching import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    MEL,
    NUM_FRAMES,
    Chunk,
    ExplicitFlow,
    FlowDecoder,
    PooledFlow,
    spec_of,
    voice_of,
)
from vllm_bounded_kv import BoundedKVStep, SinkWindow, StreamPosition
from vllm_bounded_kv.manager import BoundedKVManager

TOLERANCE = 1e-11
WINDOW = 15
"""No multiple of a chunk, so that chunks are cut."""


def frames(number: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, MEL, generator=generator, dtype=torch.float64)


class NewestFirst(ExplicitCache):
    """The cache as such a decoder is trained with it: `cat([chunk, cache])[:window]`."""

    seen = 0

    @property
    def num_entries(self) -> int:
        return self.seen

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        span: int,
        rel_bias: Tensor | None = None,
    ) -> Tensor:
        chunk = torch.cat([k, v], dim=-1)
        cache = torch.cat([chunk[:, :, :span], self.entries[layer]], dim=2)[:, :, :WINDOW]
        self.entries[layer] = cache
        keys, values = torch.cat([cache, chunk[:, :, span:]], dim=2).chunk(2, dim=-1)
        self.seen += span * (layer == LAYERS - 1)
        return ((q @ keys.mT / HEAD_DIM**0.5).softmax(-1) @ values).transpose(1, 2)


@torch.no_grad()
@pytest.mark.parametrize("in_order", [False, True])
def test_a_reversed_step_is_a_cache_kept_newest_first(in_order: bool) -> None:
    model, spec = FlowDecoder(), spec_of(SinkWindow(0, WINDOW, window_includes_step=True))
    voice = voice_of(model, frames(7, 0))
    pooled = PooledFlow(model, spec, [voice])
    pooled.open("stream", 0)
    trained = ExplicitFlow(model, spec, voice)
    newest_first = NewestFirst([entries.flip(2) for entries in voice], SinkWindow(0, 0))
    newest_first.seen = 7
    trained.cache = newest_first
    worst = 0.0
    for seed in range(12):
        chunk = Chunk(frames(NUM_FRAMES, 2 * seed), frames(NUM_FRAMES, 2 * seed + 1), 1 + seed % 3)
        told = trained.step(chunk)
        if in_order:  # control
            newest_first.entries = [
                torch.cat([entries[:, :, :6].flip(2), entries[:, :, 6:]], dim=2)
                for entries in newest_first.entries
            ]
        worst = max(worst, (pooled.step({"stream": chunk})["stream"] - told).abs().max().item())
    assert (worst > 1e-3) if in_order else (worst <= TOLERANCE)


@torch.no_grad()
def test_a_draft_leaves_no_trace() -> None:
    model = FlowDecoder()
    pooled = PooledFlow(model, spec_of(), [voice_of(model, frames(5, 0))])
    pooled.open("stream", 0)
    chunk = Chunk(frames(NUM_FRAMES, 1), frames(NUM_FRAMES, 2), num_steps=3)
    draft = Chunk(chunk.condition, chunk.noise, num_steps=3, is_draft=True)
    for _ in range(5):
        pooled.step({"stream": chunk})
    before = pooled.manager.slots.clone()
    once = pooled.step({"stream": draft})["stream"]
    again = pooled.step({"stream": draft})["stream"]
    assert torch.equal(once, again)
    assert torch.equal(pooled.manager.slots.nan_to_num(), before.nan_to_num())
    pooled.step({"stream": chunk})
    assert not torch.equal(pooled.manager.slots.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("makes_room", [True, False])
def test_a_step_that_makes_room_for_itself_may_be_run_again(makes_room: bool) -> None:
    """So all Euler steps may store, by one plan: what they overwrite is not what they read."""
    retention = SinkWindow(2, 9, window_includes_step=makes_room)
    manager = BoundedKVManager(spec_of(retention).config)
    cache = ExplicitCache(no_entries(1, 2, HEADS, HEAD_DIM), retention, reverse_step_order=True)
    worst = 0.0
    for number in range(8):
        step = BoundedKVStep([("stream", 4)], {"stream": StreamPosition(0, 4 * number)})
        assert not manager.admit(step)
        plan = manager.plan(step)
        before = list(cache.entries)
        for seed in range(3):
            generator = torch.Generator().manual_seed(10 * number + seed)
            q, k, v = torch.randn(3, 2, HEADS, 4, HEAD_DIM, generator=generator).double()
            cache.entries = list(before)
            wanted = partial(cache.attend, span=4)(0, q, k, v)
            worst = max(worst, (manager.attend(0, q, k, v, plan=plan) - wanted).abs().max().item())
        manager.commit(step)
    assert (worst <= TOLERANCE) if makes_room else (worst > 1e-3)
