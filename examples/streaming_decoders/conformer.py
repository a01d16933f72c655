"""A conformer of two rates over two slot pools: 25 tokens a second in, 50 frames a second out.

Run it: `OMP_NUM_THREADS=1 .venv/bin/python -m examples.streaming_decoders.conformer`. The model is
a small one with random weights, in the manner of the encoders ahead of flow-matching decoders.

What it needs of the pools:

* Two stacks of blocks, one at each rate, remember different things: each has a manager, with a
  config of its own. A chunk is one step of both, of `T` tokens here and `2T` there, and both are
  committed when it is done.
* Positions are relative, as in Transformer-XL: `(q + u) k + (q + v) r(distance)`, all of it scaled.
  The manager takes `q + u` for the query and the second term as `rel_bias`. Distances are counted
  in retained order, so they never exceed `max_retained + T`, however long the stream is.
* Convolutions look back too, over a few frames. That state is the module's: it lies in an array
  beside the pool, by slot, and is cleared when a stream begins, for slots are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.streaming_decoders.explicit import Attend, ExplicitCache, no_entries
from examples.streaming_decoders.traffic import Traffic, show
from vllm_bounded_kv import (
    BoundedKVConfig,
    BoundedKVSpec,
    BoundedKVStep,
    SinkWindow,
    StreamPosition,
)
from vllm_bounded_kv.manager import BoundedKVManager
from vllm_bounded_kv.step_plan import StepPlan

WIDTH, HEADS, HEAD_DIM, BLOCKS, KERNEL = 16, 2, 8, 2, 3
NUM_CONVS = 2 * BLOCKS + 1
"""One in each block, and one between the stacks."""
RATES = (1, 2)
"""Entries of each stack for a token."""
RETENTIONS = (SinkWindow(sink=2, window=9), SinkWindow(sink=3, window=14))
"""Of each stack."""


def spec_of(retention: SinkWindow, max_slots: int = 4) -> BoundedKVSpec:
    """What one stack declares."""
    return BoundedKVSpec(
        BoundedKVConfig(
            num_layers=BLOCKS,
            num_heads=HEADS,
            head_dim=HEAD_DIM,
            rows_per_request=1,
            max_source_len=0,
            retention=retention,
            max_slots=max_slots,
            dtype=torch.float64,
        )
    )


# --- the model


class LookBack(Protocol):
    """What is kept for the causal convolutions."""

    def __call__(self, conv: int, x: Tensor) -> Tensor:
        """`x [B, C, T]` behind its past, `[B, C, KERNEL - 1 + T]`; remembers `x`."""
        ...


class RelativeAttention(nn.Module):
    """Transformer-XL's, over at most `max_retained` entries and the step's own."""

    def __init__(self, max_retained: int) -> None:
        super().__init__()
        self.max_retained = max_retained
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM)
        self.position = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.u = nn.Parameter(torch.randn(HEADS, 1, HEAD_DIM))
        self.v = nn.Parameter(torch.randn(HEADS, 1, HEAD_DIM))
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        """`x [B, T, WIDTH]`."""
        qkv = self.qkv(x).unflatten(2, (3, HEADS, HEAD_DIM))
        q, k, v = qkv.transpose(1, 3).unbind(2)  # [B, H, T, D] each
        num_tokens = x.shape[1]
        distances = torch.arange(1 - num_tokens, self.max_retained + num_tokens)
        positions = self.position(sinusoid(distances)).unflatten(1, (HEADS, HEAD_DIM))
        rel_bias = torch.einsum("bhtd,rhd->bhtr", q + self.v, positions)
        return self.out(attend(layer, q + self.u, k, v, rel_bias=rel_bias).flatten(2))


class Block(nn.Module):
    """Half an MLP, attention, a gated causal convolution, half an MLP."""

    def __init__(self, max_retained: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.attention = RelativeAttention(max_retained)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, KERNEL, groups=WIDTH)

    def forward(
        self, x: Tensor, layer: int, conv: int, attend: Attend, look_back: LookBack
    ) -> Tensor:
        """`x [B, T, WIDTH]`; `layer` and `conv` say whose past to use."""
        x = x + self.mlps[0](self.norms[0](x)) / 2
        x = x + self.attention(self.norms[1](x), layer, attend)
        gated = F.glu(self.gate(self.norms[2](x))).transpose(1, 2)
        x = x + self.conv(look_back(conv, gated)).transpose(1, 2)
        x = x + self.mlps[1](self.norms[3](x)) / 2
        return self.norms[4](x)


class Conformer(nn.Module):
    """Two stacks, the second at twice the rate of the first."""

    def __init__(self, seed: int = 0) -> None:
        """Random weights, in float64."""
        super().__init__()
        torch.manual_seed(seed)
        slow, fast = (policy.sink + policy.window for policy in RETENTIONS)
        self.slow = nn.ModuleList(Block(slow) for _ in range(BLOCKS))
        self.fast = nn.ModuleList(Block(fast) for _ in range(BLOCKS))
        self.up = nn.Conv1d(WIDTH, WIDTH, KERNEL)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=1.5 / math.sqrt(parameter.shape[1]))
        self.double()

    def forward(self, x: Tensor, attends: tuple[Attend, Attend], look_back: LookBack) -> Tensor:
        """`x [B, T, WIDTH]` at 25 Hz to `[B, 2T, WIDTH]` at 50 Hz."""
        for layer, block in enumerate(self.slow):
            x = block(x, layer, layer, attends[0], look_back)
        x = x.repeat_interleave(2, dim=1).transpose(1, 2)
        x = self.up(look_back(BLOCKS, x)).transpose(1, 2)
        for layer, block in enumerate(self.fast):
            x = block(x, layer, BLOCKS + 1 + layer, attends[1], look_back)
        return x


def sinusoid(distances: Tensor) -> Tensor:
    """`[n]` distances, negative ones too, to `[n, WIDTH]`."""
    half = WIDTH // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = distances[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


# --- serving it


class PooledConformer:
    """Streams of the conformer, in two pools."""

    def __init__(self, model: Conformer, max_slots: int = 4) -> None:
        """Serve `model`."""
        self.model = model
        specs = [spec_of(retention, max_slots) for retention in RETENTIONS]
        self.managers = [BoundedKVManager.build(spec) for spec in specs]
        self.plans = [StepPlan(max_slots) for _ in specs]
        # Of every slot, and of the padding.
        shape = (NUM_CONVS, max_slots + 1, WIDTH, KERNEL - 1)
        self.left = torch.zeros(shape, dtype=torch.float64)
        self.written: dict[str, int] = {}
        """Tokens of each stream, at 25 Hz."""

    def open(self, name: str) -> None:
        """Begin a stream."""
        self.written[name] = 0

    def close(self, name: str) -> None:
        """End a stream."""
        del self.written[name]
        for manager in self.managers:
            manager.release(name)

    def step(self, chunks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One chunk `[T, WIDTH]` of each of some streams, all of one `T`, to `[2T, WIDTH]`."""
        num_tokens = len(next(iter(chunks.values())))
        steps = [self._step(list(chunks), num_tokens, rate) for rate in RATES]
        attends = []
        for manager, plan, step in zip(self.managers, self.plans, steps, strict=True):
            if refusals := manager.admit(step):
                raise RuntimeError(refusals[0].message)
            attends.append(partial(manager.attend, plan=manager.plan(step, into=plan)))
        batch = len(self.plans[0])
        x = torch.zeros(batch, num_tokens, WIDTH, dtype=torch.float64)
        for row, chunk in enumerate(chunks.values()):
            x[row] = chunk
        y = self.model(x, (attends[0], attends[1]), partial(self._look_back, self._slots(chunks)))
        for manager, step in zip(self.managers, steps, strict=True):
            manager.commit(step)
        for name in chunks:
            self.written[name] += num_tokens
        return {name: y[row] for row, name in enumerate(chunks)}

    def _step(self, names: list[str], num_tokens: int, rate: int) -> BoundedKVStep:
        """The chunk, as the stack of a rate sees it."""
        positions = {name: StreamPosition(0, self.written[name] * rate) for name in names}
        return BoundedKVStep([(name, num_tokens * rate) for name in names], positions)

    def _slots(self, chunks: Mapping[str, Tensor]) -> Tensor:
        """`[B]` whose convolution state each row has, empty where a stream begins."""
        padding = self.left.shape[1] - 1
        slots = torch.full((len(self.plans[0]),), padding)
        for row, name in enumerate(chunks):
            slot = self.managers[0].slot_of(name)
            assert slot is not None
            slots[row] = slot
            if self.written[name] == 0:
                self.left[:, slot] = 0
        return slots

    def _look_back(self, slots: Tensor, conv: int, x: Tensor) -> Tensor:
        x = torch.cat([self.left[conv, slots], x], dim=2)
        self.left[conv, slots] = x[..., 1 - KERNEL :]
        return x


class ExplicitConformer:
    """One stream, with all it ever had in its caches, convolutions' included."""

    def __init__(self, model: Conformer) -> None:
        """Begin a stream."""
        self.model = model
        self.caches = [
            ExplicitCache(no_entries(BLOCKS, 1, HEADS, HEAD_DIM), retention)
            for retention in RETENTIONS
        ]
        silence = torch.zeros(1, WIDTH, KERNEL - 1, dtype=torch.float64)
        self.pasts = [silence] * NUM_CONVS

    @property
    def num_entries(self) -> int:
        """Of the stream, at 25 Hz."""
        return self.caches[0].num_entries

    def step(self, chunk: Tensor) -> Tensor:
        """The next chunk: `[T, WIDTH]` to `[2T, WIDTH]`."""
        slow, fast = (
            partial(cache.attend, span=len(chunk) * rate)
            for cache, rate in zip(self.caches, RATES, strict=True)
        )
        return self.model(chunk[None], (slow, fast), self._look_back)[0]

    def _look_back(self, conv: int, x: Tensor) -> Tensor:
        self.pasts[conv] = torch.cat([self.pasts[conv], x], dim=2)
        return self.pasts[conv][..., 1 - KERNEL - x.shape[2] :]


def traffic(model: Conformer, seed: int = 0) -> Traffic[Tensor]:
    """Streams in 4 slots; a step has 1 to 5 tokens."""
    random = torch.Generator().manual_seed(seed)
    pooled = PooledConformer(model)

    def open_stream(name: str) -> ExplicitConformer:
        pooled.open(name)
        return ExplicitConformer(model)

    def draw(num_streams: int) -> list[Tensor]:
        num_tokens = int(torch.randint(1, 6, (), generator=random))
        size = (num_streams, num_tokens, WIDTH)
        return list(torch.randn(size, generator=random, dtype=torch.float64))

    return Traffic(pooled, open_stream, draw, seed)


def main() -> None:
    """Serve random streams, and say how far they are from explicit caches."""
    served = traffic(Conformer())
    served.run(60)
    show(served, [spec_of(retention) for retention in RETENTIONS])


if __name__ == "__main__":
    main()
