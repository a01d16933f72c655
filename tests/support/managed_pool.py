"""A manager kept busy by random requests, each judged by its oracle stream.

Beside what `slot_pool` does for `attend` alone, here everything goes through the public interface:
requests are admitted, planned, committed, reset and released, plans are padded, made again, made
ahead of the commit, and cut to a part of the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from support.oracle_attention import OracleStream, expected_slot
from support.slot_pool import oracle_of
from vllm_bounded_kv.attention import Attend
from vllm_bounded_kv.config import BoundedKVConfig, BoundedKVStep, SinkWindow, StreamPosition
from vllm_bounded_kv.manager import BoundedKVManager
from vllm_bounded_kv.step_plan import StepPlan

PADDED = 2
"""Entries that a source's storage has beyond the longest prefix, NaN."""


@dataclass(frozen=True)
class Case:
    """What a model declares, and the seed of what is done with it."""

    retention: SinkWindow | Callable[[int], SinkWindow]
    seed: int
    source_lens: tuple[int, int] = (0, 4)
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 2
    rows: int = 1
    reverse: bool = False
    query_window: int | None = None
    rel_bias: bool = False
    num_steps: int = 4
    max_tokens: int = 5
    dtype: torch.dtype = torch.float64
    num_layers: int = 2
    max_slots: int = 3


@dataclass
class Request:
    stream: OracleStream
    source: int
    padded: Tensor
    """Its prefix, as storage: `[rows, H_kv, L, 2D]`."""


@dataclass
class ManagedPool:
    """A manager under test, and what it must do."""

    case: Case
    device: str = "cpu"
    kernel: Attend | None = None
    """What the manager is to attend with, if not what it would choose; may change between steps."""
    worst: float = 0.0
    """Largest output error so far."""
    requests: dict[str, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case = self.case
        self.config = BoundedKVConfig(
            num_layers=case.num_layers,
            num_heads=case.kv_heads,
            head_dim=case.head_dim,
            rows_per_request=case.rows,
            max_source_len=case.source_lens[1],
            retention=case.retention,
            max_slots=case.max_slots,
            min_source_len=case.source_lens[0],
            dtype=case.dtype,
            reverse_step_order=case.reverse,
            query_window=case.query_window,
        )
        self.manager = BoundedKVManager(self.config, self.device)
        self.manager.slots.fill_(torch.nan)
        self.random = random.Random(case.seed)
        self.torch_random = torch.Generator().manual_seed(case.seed)
        self.lengths = list(range(case.source_lens[0], case.source_lens[1] + 1))
        self.sources = torch.stack([self.source(length) for length in self.lengths])
        self.expected = self.manager.slots.cpu().clone()
        self.layer = case.num_layers - 1
        """The one that is used; the others stay as they are."""
        self.num_named = 0

    def normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self.torch_random, dtype=torch.float64)
        return drawn.to(self.case.dtype)

    def source(self, length: int) -> Tensor:
        longest = self.case.source_lens[1] + PADDED
        shape = (self.case.rows, self.case.kv_heads, longest, 2 * self.case.head_dim)
        padded = torch.full(shape, torch.nan, dtype=self.case.dtype)
        padded[:, :, :length] = self.normal(*padded[:, :, :length].shape)
        return padded

    def stream(self) -> tuple[OracleStream, int, Tensor]:
        index = self.random.randrange(len(self.lengths))
        length = self.lengths[index]
        is_own = self.random.random() < 0.4
        padded = self.source(length) if is_own else self.sources[index]
        stream = oracle_of(self.config, padded[:, :, :length])
        return stream, -1 if is_own else index, padded

    def churn(self) -> None:
        """Requests come, begin anew and go; what a free slot holds becomes NaN."""
        for name in list(self.requests):
            fate = self.random.random()
            slot = self.manager.slot_of(name)
            if fate < 0.1:
                assert self.manager.release(name) == (slot is not None)
                del self.requests[name]
                self.forget(slot)
            elif fate < 0.15 and slot is not None:
                self.manager.reset(name)
                self.requests[name] = Request(*self.stream())
                self.forget(slot)
        while len(self.requests) < self.random.randint(1, self.config.max_slots):
            self.num_named += 1
            self.requests[f"request {self.num_named}"] = Request(*self.stream())

    def forget(self, slot: int | None) -> None:
        if slot is not None:
            self.manager.slots[:, slot] = torch.nan
            self.expected[:, slot] = torch.nan

    def position(self, name: str) -> StreamPosition:
        request = self.requests[name]
        return StreamPosition(request.stream.source_len, request.stream.written, request.source)

    def step(self) -> None:
        """One step of a random part of the requests, some of it padding or left out."""
        names = self.random.sample(
            sorted(self.requests), self.random.randint(1, len(self.requests))
        )
        num_tokens = self.random.randint(1, self.case.max_tokens)
        segments = [
            (name, self.random.choice([num_tokens, self.random.randint(0, num_tokens)]))
            for name in names
        ]
        step = BoundedKVStep(segments, {name: self.position(name) for name in names})
        assert not self.manager.admit(step)
        num_padding = self.random.choice([0, 0, 1, 2])
        plan = StepPlan(len(names) + num_padding, self.device)
        self.manager.plan(step, into=plan)
        batch: list[tuple[str | None, int]] = [*segments, *[(None, 0)] * num_padding]
        if self.random.random() < 0.2:  # a forward of part of the batch, in another order
            rows = self.random.sample(range(len(batch)), self.random.randint(1, len(batch)))
            plan, batch = plan.select(rows), [batch[row] for row in rows]
            segments = [(name, span) for name, span in batch if name is not None]
            step = BoundedKVStep(segments, {name: self.position(name) for name, _ in segments})
        self.attend(batch, num_tokens, plan)
        for _ in range(self.random.choice([1, 1, 2])):
            self.manager.commit(step)
        self.manager.check_integrity()

    def attend(self, batch: list[tuple[str | None, int]], num_tokens: int, plan: StepPlan) -> None:
        case = self.case
        total, heads = len(batch) * case.rows, case.kv_heads * case.group
        q = self.normal(total, heads, num_tokens, case.head_dim)
        kv = self.normal(total, case.kv_heads, num_tokens, 2 * case.head_dim)
        bias = None
        if case.rel_bias:
            longest = self.config.max_retained + 2 * num_tokens - 1
            bias = self.normal(total, heads, num_tokens, longest)
        own_sources = [
            self.sources[0] if name is None else self.requests[name].padded for name, _ in batch
        ]
        outputs: list[Tensor] = []
        for b, (name, span) in enumerate(batch):
            own = slice(b * case.rows, (b + 1) * case.rows)
            own_bias = None if bias is None else bias[own]
            if name is None:
                nothing = kv[own, :, :0]
                stream = OracleStream(nothing, 0, 0, query_window=case.query_window)
                outputs.append(stream.attend(q[own], kv[own], 0, own_bias))
                continue
            stream = self.requests[name].stream
            outputs.append(stream.attend(q[own], kv[own], span, own_bias))
            slot = self.manager.slot_of(name)
            self.expected[self.layer, slot] = expected_slot(
                stream,
                self.expected[self.layer, slot],
                kv[own],
                span,
                self.config.sink_capacity,
            )
            stream.join(kv[own], span)
        if self.kernel is not None:
            self.manager._attend = self.kernel
        k, v = kv.to(self.device).chunk(2, dim=-1)
        out = self.manager.attend(
            self.layer,
            q.to(self.device),
            k,
            v,
            sources=self.sources.to(self.device),
            row_sources=torch.stack(own_sources).to(self.device),
            plan=plan,
            rel_bias=None if bias is None else bias.to(self.device),
        )
        assert out.dtype == case.dtype
        error = (out.cpu().double() - torch.cat(outputs)).abs()
        self.worst = max(self.worst, torch.nan_to_num(error, nan=torch.inf).max().item())
        slots = self.manager.slots.cpu()
        assert torch.equal(slots.view(torch.uint8), self.expected.view(torch.uint8))

    def run(self) -> ManagedPool:
        for _ in range(self.case.num_steps):
            self.churn()
            self.step()
        return self
