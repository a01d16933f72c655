"""A small pool of slots kept busy by random requests, each judged by its oracle stream.

Requests of different source lengths come, take a slot that an earlier one left full of NaN, take
part in some steps and not in others, and go. Any `attend` with the reference's signature can be
driven; what differs from the oracle is recorded, not asserted, so that controls can use it too.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from support.oracle_attention import OracleStream, expected_slot
from vllm_bounded_kv.config import BoundedKVConfig, SinkWindow
from vllm_bounded_kv.layout import PADDING_ROW, RowPlan, plan_row
from vllm_bounded_kv.step_plan import StepPlan

NUM_STEPS = 30
HEAD_DIM = 8
SINK_3_WINDOW_5 = SinkWindow(3, 5)
SOURCE_LENGTHS = [0, 1, 3, 5, 8]
PADDED_SOURCE_LEN = 10


@dataclass(frozen=True)
class Setup:
    """One configuration of the matrix; the defaults are the plainest case."""

    retention: SinkWindow | Callable[[int], SinkWindow] = SINK_3_WINDOW_5
    heads: int = 2
    kv_heads: int = 2
    rows: int = 1
    reverse: bool = False
    query_window: int | None = None
    rel_bias: bool = False
    dtype: torch.dtype = torch.float64

    def config(self) -> BoundedKVConfig:
        return BoundedKVConfig(
            num_layers=1,
            num_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            rows_per_request=self.rows,
            max_source_len=max(SOURCE_LENGTHS),
            retention=self.retention,
            max_slots=4,
            dtype=self.dtype,
            reverse_step_order=self.reverse,
            query_window=self.query_window,
        )


def oracle_of(config: BoundedKVConfig, source: Tensor) -> OracleStream:
    """The oracle for a request whose prefix is `source` `[rows, H_kv, source_len, 2D]`."""
    policy = config.retention_for(source.shape[2])
    return OracleStream(
        source,
        policy.sink,
        policy.window,
        policy.window_includes_step,
        config.query_window,
        config.reverse_step_order,
    )


@dataclass
class Request:
    stream: OracleStream
    slot: int
    source: int
    """Index among the shared sources, or -1."""
    padded: Tensor
    """Its prefix, padded with NaN to the common length: `[rows, H_kv, L, 2D]`."""


@dataclass
class Pool:
    """A pool of slots under test, and the oracle streams that say what it must do."""

    attend: Callable[..., Tensor]
    setup: Setup
    seed: int
    told: Setup | None = None
    """What the code under test is told, where a control tells it something else."""
    worst: float = 0.0
    """Largest output error so far."""
    slots_differ: bool = False
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = self.setup.config()
        told = self.told or self.setup
        self.told_config, self.tells_bias = told.config(), told.rel_bias
        self.random = random.Random(self.seed)
        self.torch_random = torch.Generator().manual_seed(self.seed)
        shape = (self.config.max_slots, self.setup.rows, self.setup.kv_heads)
        # One entry more than needed, so that a control's longer ring has somewhere to be.
        self.slots = self.nan(*shape, self.config.slot_tokens + 1, 2 * HEAD_DIM)
        # Sources longer than any prefix, NaN past each one's end, as pages of a store would be.
        self.sources = torch.stack([self.source(length) for length in SOURCE_LENGTHS])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.torch_random, dtype=torch.float64).to(
            self.setup.dtype
        )

    def nan(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=self.setup.dtype)

    def source(self, length: int) -> Tensor:
        padded = self.nan(self.setup.rows, self.setup.kv_heads, PADDED_SOURCE_LEN, 2 * HEAD_DIM)
        padded[:, :, :length] = self.normal(*padded.shape)[:, :, :length]
        return padded

    def admit(self) -> None:
        free = sorted(set(range(self.config.max_slots)) - {r.slot for r in self.requests})
        index = self.random.randrange(len(SOURCE_LENGTHS))
        length, own = SOURCE_LENGTHS[index], self.random.random() < 0.4
        padded = self.source(length) if own else self.sources[index]
        stream = oracle_of(self.config, padded[:, :, :length])
        slot = self.random.choice(free)
        self.slots[slot] = torch.nan
        self.requests.append(Request(stream, slot, -1 if own else index, padded))

    def plan(self, request: Request, span: int) -> RowPlan:
        return plan_row(
            self.told_config.retention_for(request.stream.source_len),
            sink_capacity=self.config.sink_capacity,
            slot=request.slot,
            source_len=request.stream.source_len,
            written=request.stream.written,
            span=span,
            source=request.source,
            reverse_step_order=self.told_config.reverse_step_order,
        )

    def churn(self) -> None:
        """Let requests come and go; a released slot keeps what it holds."""
        if self.requests and self.random.random() < 0.1:
            self.requests.pop(self.random.randrange(len(self.requests)))
        while len(self.requests) < self.random.randint(1, self.config.max_slots):
            self.admit()

    def step(self) -> None:
        """One batch: a random subset of the requests, and a padding row somewhere."""
        setup = self.setup
        batch: list[Request | None] = list(
            self.random.sample(self.requests, self.random.randint(1, len(self.requests)))
        )
        batch.insert(self.random.randint(0, len(batch)), None)
        num_tokens = self.random.choice([1, 1, 2, 3, 5, 7, 12])
        spans = [
            self.random.choice([num_tokens, self.random.randint(0, num_tokens)]) for _ in batch
        ]
        plan = [
            PADDING_ROW if r is None else self.plan(r, s) for r, s in zip(batch, spans, strict=True)
        ]
        total = len(batch) * setup.rows
        q = self.normal(total, setup.heads, num_tokens, HEAD_DIM)
        kv = self.normal(total, setup.kv_heads, num_tokens, 2 * HEAD_DIM)
        longest = self.config.max_retained + 2 * num_tokens - 1
        bias = self.normal(total, setup.heads, num_tokens, longest) if setup.rel_bias else None
        row_sources = torch.stack([self.sources[0] if r is None else r.padded for r in batch])

        expected_slots = self.slots.clone()
        expected: list[Tensor] = []
        for b, (request, span) in enumerate(zip(batch, spans, strict=True)):
            own = slice(b * setup.rows, (b + 1) * setup.rows)
            own_bias = None if bias is None else bias[own]
            if request is None:
                expected.append(self.nothing().attend(q[own], kv[own], 0, own_bias))
                continue
            expected.append(request.stream.attend(q[own], kv[own], span, own_bias))
            expected_slots[request.slot] = expected_slot(
                request.stream,
                expected_slots[request.slot],
                kv[own],
                span,
                self.config.sink_capacity,
            )
            request.stream.join(kv[own], span)

        out = self.attend(
            q,
            kv[..., :HEAD_DIM],
            kv[..., HEAD_DIM:],
            self.slots,
            StepPlan.of(plan),
            sources=self.sources,
            row_sources=row_sources,
            query_window=self.told_config.query_window,
            reverse_step_order=self.told_config.reverse_step_order,
            rel_bias=bias if self.tells_bias else None,
        )
        assert out.dtype == setup.dtype
        assert out.shape == (total, num_tokens, setup.heads, HEAD_DIM)
        self.compare(out, expected, expected_slots)

    def nothing(self) -> OracleStream:
        """The stream of a padding row, which attends its own tokens."""
        source = self.normal(self.setup.rows, self.setup.kv_heads, 0, 2 * HEAD_DIM)
        return OracleStream(source, 0, 0, query_window=self.setup.query_window)

    def compare(self, out: Tensor, expected: list[Tensor], slots: Tensor) -> None:
        for b, wanted in enumerate(expected):
            got = out[b * self.setup.rows : (b + 1) * self.setup.rows].double()
            error = torch.nan_to_num((got - wanted).abs(), nan=torch.inf).max().item()
            self.worst = max(self.worst, error)
        same = torch.equal(self.slots.view(torch.uint8), slots.view(torch.uint8))
        self.slots_differ |= not same

    def run(self, num_steps: int = NUM_STEPS) -> "Pool":
        for _ in range(num_steps):
            self.churn()
            self.step()
        return self
