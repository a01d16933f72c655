"""A chunked flow-matching decoder (mel frames from conditions) over the slot pool.

Run it: `OMP_NUM_THREADS=1 .venv/bin/python -m examples.streaming_decoders.flow_matching`. The model
is a small one with random weights, in the manner of today's streaming speech decoders.

What it needs of the pool:

* Guidance: each frame is computed with its condition and without. A request owns two rows of KV
  (`rows_per_request=2`), and row `2 * b + r` of the batch is row `r` of segment `b`.
* A chunk takes several Euler steps, and the keys and values to remember are the last one's. So
  there are two plans of it: one with span 0, by which the early steps read, and one whose span is
  what joins the stream, for the last.
* Within a chunk everyone sees everyone (`query_window=None`): `CHUNK` frames, which join, and
  `LOOKAHEAD` frames more, which come again in the next chunk and do not.
* Its cache, as trained, is `torch.cat([chunk, cache])[:window]`, newest first: when a chunk is cut,
  its later frames go first. The pool counts the other way, so a chunk joins last frame first
  (`reverse_step_order`), and the window makes room for the chunk (`window_includes_step`). The
  early steps, which add nothing, see the whole window.
* The voice is a prefix that is computed once: a shared one, or one that a request brings along.
* Streams that are content with fewer Euler steps begin later: the forwards before that run the
  others (`plan.select`). And a chunk can be asked for as a draft, which leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from examples.streaming_decoders.explicit import Attend, ExplicitCache, no_entries
from examples.streaming_decoders.prefixes import Prefix, prefix_len, stack_prefixes
from examples.streaming_decoders.traffic import Traffic, show
from vllm_bounded_kv import (
    BoundedKVConfig,
    BoundedKVSpec,
    BoundedKVStep,
    SinkWindow,
    StreamPosition,
)
from vllm_bounded_kv.config import RetentionPolicy
from vllm_bounded_kv.manager import BoundedKVManager
from vllm_bounded_kv.step_plan import StepPlan

CHUNK, LOOKAHEAD = 6, 2
NUM_FRAMES = CHUNK + LOOKAHEAD
MEL, WIDTH, HEADS, HEAD_DIM, LAYERS = 5, 16, 2, 8, 2
GUIDANCE = 0.7
MAX_VOICE_LEN = 9


def voice_and_window(source_len: int) -> SinkWindow:
    """All of the voice, the first 4 frames spoken with it, and 20 frames up to now."""
    return SinkWindow(sink=source_len + 4, window=20, window_includes_step=True)


def spec_of(retention: RetentionPolicy = voice_and_window, max_slots: int = 4) -> BoundedKVSpec:
    """What the decoder declares."""
    return BoundedKVSpec(
        BoundedKVConfig(
            num_layers=LAYERS,
            num_heads=HEADS,
            head_dim=HEAD_DIM,
            rows_per_request=2,
            max_source_len=MAX_VOICE_LEN,
            retention=retention,
            max_slots=max_slots,
            dtype=torch.float64,
            reverse_step_order=True,
        )
    )


# --- the model


class Block(nn.Module):
    """Attention with rotary positions, and a small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, positions: Tensor, layer: int, attend: Attend) -> Tensor:
        """`x [B * 2, T, WIDTH]`, `positions [B * 2, T]`."""
        qkv = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, HEAD_DIM))
        q, k, v = qkv.transpose(1, 3).unbind(2)  # [B * 2, H, T, D] each
        attended = attend(layer, rotate(q, positions), rotate(k, positions), v)
        x = x + self.out(attended.flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class FlowDecoder(nn.Module):
    """The velocity of mel frames on their way from noise."""

    def __init__(self, seed: int = 0) -> None:
        """Random weights, large enough for attention to matter, in float64."""
        super().__init__()
        torch.manual_seed(seed)
        self.frames = nn.Linear(2 * MEL, WIDTH)
        self.time = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, MEL)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=1.5 / math.sqrt(parameter.shape[1]))
        self.double()

    def forward(
        self, x: Tensor, condition: Tensor, time: Tensor, start: Tensor, attend: Attend
    ) -> Tensor:
        """Guided velocity `[B, T, MEL]`.

        `x, condition [B, T, MEL]`; `time [B]` from 0 (noise) to 1; rows begin at `start [B]` of
        their streams.
        """
        both = torch.stack([condition, torch.zeros_like(condition)], dim=1).flatten(0, 1)
        hidden = self.frames(torch.cat([x.repeat_interleave(2, dim=0), both], dim=-1))
        angle = time[:, None] * torch.tensor([1.0, 3.0], dtype=torch.float64)
        hidden_time = self.time(torch.cat([angle.sin(), angle.cos()], dim=-1))
        hidden = hidden + hidden_time.repeat_interleave(2, dim=0)[:, None]
        positions = start.repeat_interleave(2)[:, None] + torch.arange(x.shape[1])
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, positions, layer, attend)
        with_condition, without = self.out(hidden).unflatten(0, (-1, 2)).unbind(1)
        return with_condition + GUIDANCE * (with_condition - without)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions: `x [N, H, T, D]`, `positions [N, T]`."""
    half = x.shape[-1] // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = positions[:, None, :, None] * frequency
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# --- serving it


@dataclass(frozen=True)
class Chunk:
    """The next frames of a stream."""

    condition: Tensor
    """`[NUM_FRAMES, MEL]`."""
    noise: Tensor
    """`[NUM_FRAMES, MEL]`."""
    num_steps: int
    """Of Euler's method: more are better."""
    is_draft: bool = False
    """Whether the chunk will be asked for again: nothing of it is stored then."""

    @property
    def span(self) -> int:
        """Frames that join the stream."""
        return 0 if self.is_draft else CHUNK


class PooledFlow:
    """Streams of the decoder, in a pool."""

    def __init__(self, model: FlowDecoder, spec: BoundedKVSpec, voices: Sequence[Prefix]) -> None:
        """Serve `model`, with some shared `voices`."""
        self.model = model
        self.manager = BoundedKVManager.build(spec)
        self.managers = [self.manager]
        self.voices = voices
        self.sources = stack_prefixes(voices)
        max_slots = spec.config.max_slots
        self.reading, self.writing = StepPlan(max_slots), StepPlan(max_slots)
        self.positions: dict[str, StreamPosition] = {}
        self.own_voices: dict[str, Prefix] = {}

    def open(self, name: str, voice: int | Prefix) -> None:
        """Begin a stream, with one of the shared voices or with its own."""
        if isinstance(voice, int):
            source_len = prefix_len(self.voices[voice])
            self.positions[name] = StreamPosition(source_len, 0, source=voice)
        else:
            self.positions[name] = StreamPosition(prefix_len(voice), 0, source=-1)
            self.own_voices[name] = voice

    def close(self, name: str) -> None:
        """End a stream."""
        del self.positions[name]
        self.own_voices.pop(name, None)
        self.manager.release(name)

    def step(self, chunks: Mapping[str, Chunk]) -> dict[str, Tensor]:
        """One chunk of each of some streams: `[CHUNK, MEL]` each."""
        positions = {name: self.positions[name] for name in chunks}
        reading = BoundedKVStep([(name, 0) for name in chunks], positions)
        writing = BoundedKVStep([(name, chunk.span) for name, chunk in chunks.items()], positions)
        if refusals := self.manager.admit(writing):
            raise RuntimeError(refusals[0].message)
        self.manager.plan(reading, into=self.reading)
        self.manager.plan(writing, into=self.writing)
        frames = self._denoise(chunks)
        self.manager.commit(writing)
        for name, span in writing.segments:
            position = self.positions[name]
            self.positions[name] = replace(position, written=position.written + span)
        return {name: frames[row, :CHUNK] for row, name in enumerate(chunks)}

    def _denoise(self, chunks: Mapping[str, Chunk]) -> Tensor:
        """All Euler steps, the last of them together: `[B, NUM_FRAMES, MEL]`, padding included."""
        batch = len(self.writing)
        x = torch.zeros(batch, NUM_FRAMES, MEL, dtype=torch.float64)
        condition = torch.zeros_like(x)
        start = torch.zeros(batch, dtype=torch.long)
        num_steps = torch.ones(batch, dtype=torch.long)
        for row, (name, chunk) in enumerate(chunks.items()):
            x[row], condition[row] = chunk.noise, chunk.condition
            start[row] = self.positions[name].num_entries
            num_steps[row] = chunk.num_steps
        own = self._own_voices(list(chunks))
        for left in range(int(num_steps.max()), 0, -1):
            rows = (num_steps >= left).nonzero().flatten()
            plan = self.writing if left == 1 else self.reading.select(rows.tolist())
            attend = partial(self._attend, plan, own and [layer[rows] for layer in own])
            time = (num_steps[rows] - left) / num_steps[rows].double()
            velocity = self.model(x[rows], condition[rows], time, start[rows], attend)
            x[rows] += velocity / num_steps[rows, None, None]
        return x

    def _own_voices(self, names: Sequence[str]) -> list[Tensor] | None:
        """`[B, 2, H, L, 2D]` of each layer; of no meaning where a stream has a shared voice."""
        if not any(name in self.own_voices for name in names):
            return None
        voices = [self.own_voices.get(name, self.voices[0]) for name in names]
        padding = [self.voices[0]] * (len(self.writing) - len(names))
        return stack_prefixes(voices + padding)

    def _attend(
        self,
        plan: StepPlan,
        own: list[Tensor] | None,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rel_bias: Tensor | None = None,
    ) -> Tensor:
        return self.manager.attend(
            layer,
            q,
            k,
            v,
            sources=self.sources[layer],
            row_sources=None if own is None else own[layer],
            plan=plan,
            rel_bias=rel_bias,
        )


class ExplicitFlow:
    """One stream, with all it ever had in its caches."""

    def __init__(self, model: FlowDecoder, spec: BoundedKVSpec, voice: Prefix) -> None:
        """Begin a stream."""
        self.model = model
        retention = spec.config.retention_for(prefix_len(voice))
        self.cache = ExplicitCache(list(voice), retention, reverse_step_order=True)

    @property
    def num_entries(self) -> int:
        """Of the stream."""
        return self.cache.num_entries

    def step(self, chunk: Chunk) -> Tensor:
        """The next chunk: `[CHUNK, MEL]`."""
        x, start = chunk.noise[None], torch.tensor([self.num_entries])
        for number in range(chunk.num_steps):
            is_last = number == chunk.num_steps - 1
            attend = partial(self.cache.attend, span=chunk.span if is_last else 0)
            time = torch.tensor([number / chunk.num_steps], dtype=torch.float64)
            x = x + self.model(x, chunk.condition[None], time, start, attend) / chunk.num_steps
        return x[0, :CHUNK]


@torch.no_grad()
def voice_of(model: FlowDecoder, frames: Tensor) -> Prefix:
    """The prefix of a voice: clean frames `[L, MEL]`, read as one chunk at the end of its way."""
    nothing = no_entries(LAYERS, 2, HEADS, HEAD_DIM)
    cache = ExplicitCache(nothing, SinkWindow(0, 0), reverse_step_order=True)
    attend = partial(cache.attend, span=len(frames))
    start, time = torch.tensor([0]), torch.ones(1, dtype=torch.float64)
    model(frames[None], frames[None], time, start, attend)
    return cache.entries


def traffic(model: FlowDecoder, spec: BoundedKVSpec, seed: int = 0) -> Traffic[Chunk]:
    """Streams with shared voices and with their own, of 1 to 4 Euler steps, some chunks drafts."""
    random = torch.Generator().manual_seed(seed)

    def frames(number: int) -> Tensor:
        return torch.randn(number, MEL, generator=random, dtype=torch.float64)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    voices = [voice_of(model, frames(length)) for length in (3, MAX_VOICE_LEN, 6)]
    pooled = PooledFlow(model, spec, voices)

    def open_stream(name: str) -> ExplicitFlow:
        shared = number(0, 2 * len(voices) - 1)
        if shared < len(voices):
            pooled.open(name, shared)
            return ExplicitFlow(model, spec, voices[shared])
        own = voice_of(model, frames(number(1, MAX_VOICE_LEN)))
        pooled.open(name, own)
        return ExplicitFlow(model, spec, own)

    def draw(num_streams: int) -> list[Chunk]:
        return [
            Chunk(frames(NUM_FRAMES), frames(NUM_FRAMES), number(1, 4), number(1, 5) == 1)
            for _ in range(num_streams)
        ]

    return Traffic(pooled, open_stream, draw, seed)


def main() -> None:
    """Serve random streams, and say how far they are from explicit caches."""
    spec = spec_of()
    served = traffic(FlowDecoder(), spec)
    served.run(60)
    show(served, [spec])


if __name__ == "__main__":
    main()
