"""Streams that come, speak and go, each served twice: by the pool, and alone by explicit caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from vllm_bounded_kv.config import BoundedKVSpec
from vllm_bounded_kv.manager import BoundedKVManager

Chunk = TypeVar("Chunk")
ChunkIn = TypeVar("ChunkIn", contravariant=True)


class Pooled(Protocol[ChunkIn]):
    """A decoder that serves many streams."""

    @property
    def managers(self) -> Sequence[BoundedKVManager]:
        """Its pools, one or more."""

    def step(self, chunks: Mapping[str, ChunkIn]) -> dict[str, Tensor]:
        """One chunk of each of some streams."""

    def close(self, name: str) -> None:
        """The end of a stream."""


class Explicit(Protocol[ChunkIn]):
    """The same decoder, serving one stream."""

    @property
    def num_entries(self) -> int:
        """Of its (first) cache."""

    def step(self, chunk: ChunkIn) -> Tensor:
        """The stream's next chunk."""


@dataclass
class Step:
    """What one step showed."""

    num_streams: int
    longest: int
    """Entries of the longest stream in it."""
    error: float
    """Largest difference between the two ways."""


@dataclass
class Traffic(Generic[Chunk]):
    """Random streams of one decoder: of all ages, sources and slots, some of them in each step."""

    pooled: Pooled[Chunk]
    open: Callable[[str], Explicit[Chunk]]
    """Opens a stream in the pool, and gives its explicit twin."""
    draw: Callable[[int], Sequence[Chunk]]
    """Input for a step of so many streams."""
    seed: int = 0
    steps: list[Step] = field(default_factory=list)
    num_opened: int = 0

    @torch.no_grad()
    def run(self, num_steps: int) -> Traffic[Chunk]:
        """Go on for some steps. The first stream stays; the others come and go."""
        random = Random(self.seed)
        for manager in self.pooled.managers:
            manager.slots.fill_(torch.nan)
        twins: dict[str, Explicit[Chunk]] = {}
        for _ in range(num_steps):
            for name in list(twins)[1:]:
                if random.random() < 0.08:
                    self._close(name)
                    del twins[name]
            max_slots = self.pooled.managers[0].config.max_slots
            while len(twins) < random.randint(1, max_slots):
                name = f"stream {self.num_opened}"
                twins[name] = self.open(name)
                self.num_opened += 1
            taking_part = random.sample(sorted(twins), random.randint(1, len(twins)))
            self._step({name: twins[name] for name in taking_part})
        return self

    @property
    def worst(self) -> float:
        """The largest error of all steps."""
        return max(step.error for step in self.steps)

    @property
    def longest(self) -> int:
        """Entries of the longest stream."""
        return max(step.longest for step in self.steps)

    def _step(self, twins: Mapping[str, Explicit[Chunk]]) -> None:
        chunks = dict(zip(twins, self.draw(len(twins)), strict=True))
        outputs = self.pooled.step(chunks)
        error = 0.0
        for name, twin in twins.items():
            difference = (outputs[name] - twin.step(chunks[name])).abs()
            error = max(error, difference.nan_to_num(nan=torch.inf).max().item())
        longest = max(twin.num_entries for twin in twins.values())
        self.steps.append(Step(len(twins), longest, error))

    def _close(self, name: str) -> None:
        """What a stream leaves behind becomes NaN: whoever reads it will show."""
        slots = [(manager, manager.slot_of(name)) for manager in self.pooled.managers]
        self.pooled.close(name)
        for manager, slot in slots:
            if slot is not None:
                manager.slots[:, slot] = torch.nan
            manager.check_integrity()


def show(traffic: Traffic[Chunk], specs: Sequence[BoundedKVSpec], every: int = 10) -> None:
    """Print every so many steps, and what the streams took."""
    print("step   streams   longest stream   max |pool - explicit|")
    for number, step in list(enumerate(traffic.steps, 1))[every - 1 :: every]:
        print(f"{number:4}{step.num_streams:10}{step.longest:17}{step.error:24.1e}")
    max_slots = specs[0].config.max_slots
    slot_bytes = sum(BoundedKVManager.memory_bytes(spec) for spec in specs) // max_slots
    slot_tokens = " and ".join(str(spec.config.slot_tokens) for spec in specs)
    print(f"{traffic.num_opened} streams have shared {max_slots} slots")
    print(f"a stream: {slot_tokens} entries, {slot_bytes:,} bytes, however long it is")
    print(f"in 1 GiB: {(1 << 30) // slot_bytes:,} streams")
