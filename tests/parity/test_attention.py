"""Every `attend` equals the oracle, in every configuration, over long random streams.

Outputs are compared within a tolerance per dtype, slots bit for bit.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from support.slot_pool import Pool, Setup
from vllm_bounded_kv.attention import Attend, cpu, reference
from vllm_bounded_kv.config import SinkWindow
from vllm_bounded_kv.layout import plan_row
from vllm_bounded_kv.step_plan import StepPlan

TOLERANCE = {
    torch.float64: 1e-12,  # two orders of summation
    torch.float32: 2e-6,
    torch.float16: 2e-3,  # one rounding of outputs below 4
    torch.bfloat16: 1.6e-2,
}
"""Largest absolute error against float64, for unit-normal queries, keys and values."""

SETUPS = {
    "plain": Setup(),
    "no sink": Setup(SinkWindow(0, 4)),
    "no window": Setup(SinkWindow(6, 0)),
    "nothing kept": Setup(SinkWindow(0, 0)),
    "window 1": Setup(SinkWindow(2, 1)),
    "window of the step's length": Setup(SinkWindow(2, 7)),
    "window never full": Setup(SinkWindow(1, 1000)),
    "sink longer than any source": Setup(SinkWindow(12, 4)),
    "window includes the step": Setup(SinkWindow(3, 6, window_includes_step=True)),
    "policy by source length": Setup(lambda s: SinkWindow((3 * s) % 7, (5 * s + 2) % 9)),
    "grouped heads": Setup(heads=6, kv_heads=2),
    "one KV head": Setup(heads=4, kv_heads=1),
    "two rows": Setup(rows=2),
    "reversed": Setup(reverse=True),
    "reversed, step included": Setup(SinkWindow(3, 6, True), reverse=True),
    "query window": Setup(SinkWindow(0, 5), query_window=5),
    "short query window": Setup(SinkWindow(0, 9), query_window=2),
    "query window 0": Setup(SinkWindow(0, 0), query_window=0),
    "bias": Setup(rel_bias=True),
    "bias and query window": Setup(SinkWindow(0, 6), query_window=4, rel_bias=True),
    "all at once": Setup(
        lambda s: SinkWindow(s // 2 + 1, 6, s % 2 == 0),
        heads=4,
        kv_heads=2,
        rows=2,
        reverse=True,
        rel_bias=True,
    ),
}


IMPLEMENTATIONS: dict[str, Attend] = {"reference": reference.attend, "cpu": cpu.attend}


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request: pytest.FixtureRequest) -> Attend:
    return IMPLEMENTATIONS[request.param]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SETUPS)
def test_streams_equal_the_oracle(attend: Attend, name: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        pool = Pool(attend, replace(SETUPS[name], dtype=dtype), seed).run()
        assert pool.worst <= TOLERANCE[dtype]
        assert not pool.slots_differ


@pytest.mark.parametrize("written", range(4, 12))
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 11])
def test_the_result_does_not_depend_on_how_a_stream_was_chunked(
    attend: Attend, written: int, chunk: int
) -> None:
    """W-1, W, W+1 and past it: slots and the next query agree with one token per step."""

    def play(size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        kv = torch.randn(1, 1, written, 8, generator=generator, dtype=torch.float64)
        query = torch.randn(1, 1, 1, 4, generator=generator, dtype=torch.float64)
        slots = torch.full((1, 1, 1, 7, 8), torch.nan, dtype=torch.float64)

        def run(q: Tensor, tokens: Tensor, start: int, span: int) -> Tensor:
            row = plan_row(
                SinkWindow(2, 5), sink_capacity=2, slot=0, source_len=0, written=start, span=span
            )
            return attend(q, tokens[..., :4], tokens[..., 4:], slots, StepPlan.of([row]))

        for start in range(0, written, size):
            part = kv[:, :, start : start + size]
            run(part[..., :4], part, start, part.shape[2])
        return run(query, kv[:, :, :1], written, 0), slots

    for got, wanted in zip(play(chunk), play(1), strict=True):
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("true", "told", "slots_differ"),
    [
        (Setup(SinkWindow(4, 5)), Setup(SinkWindow(3, 5)), True),
        (Setup(SinkWindow(4, 5)), Setup(SinkWindow(4, 4)), True),
        (Setup(SinkWindow(4, 5)), Setup(SinkWindow(4, 6)), True),
        (Setup(SinkWindow(4, 5, True)), Setup(SinkWindow(4, 5, False)), False),
        (Setup(reverse=True), Setup(reverse=False), True),
        (Setup(SinkWindow(0, 6), query_window=4), Setup(SinkWindow(0, 6), query_window=3), False),
        (Setup(SinkWindow(0, 6), query_window=4), Setup(SinkWindow(0, 6)), False),
        (Setup(rel_bias=True), Setup(rel_bias=False), False),
    ],
    ids=["sink", "window - 1", "window + 1", "includes", "order", "query", "causal", "bias"],
)
def test_control_every_wrong_option_is_seen(
    attend: Attend, true: Setup, told: Setup, slots_differ: bool
) -> None:
    """The comparison is worth something: each of these mistakes fails it."""
    pool = Pool(attend, true, seed=0, told=told).run()
    assert pool.worst > 0.1
    assert pool.slots_differ is slots_differ


def test_control_a_read_of_what_was_never_written_is_nan(attend: Attend) -> None:
    """So the NaN that fills free slots cannot pass unnoticed."""
    slots = torch.full((1, 1, 1, 7, 8), torch.nan)
    row = plan_row(SinkWindow(2, 5), sink_capacity=2, slot=0, source_len=0, written=3, span=0)
    q, k, v = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4)
    assert attend(q, k, v, slots, StepPlan.of([row])).isnan().all()


def test_a_zero_row_reads_and_writes_nothing_and_stays_finite(attend: Attend) -> None:
    slots = torch.full((1, 1, 1, 6, 8), torch.nan)
    q, k, v = torch.randn(2, 2, 3, 4), torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
    out = attend(q, k, v, slots, StepPlan(2))
    assert out.isfinite().all()
    assert slots.isnan().all()


@dataclass
class OneStep:
    """Arguments of a valid step of two tokens; tests spoil them one at a time."""

    q: Tensor = field(default_factory=lambda: torch.randn(1, 2, 2, 4))
    k: Tensor = field(default_factory=lambda: torch.randn(1, 1, 2, 4))
    v: Tensor = field(default_factory=lambda: torch.randn(1, 1, 2, 4))
    slots: Tensor = field(default_factory=lambda: torch.full((2, 1, 1, 6, 8), torch.nan))
    sources: Tensor | None = field(default_factory=lambda: torch.randn(1, 1, 1, 3, 8))
    row_sources: Tensor | None = None
    rel_bias: Tensor | None = None
    span: int = 2
    source: int = 0

    def run(self, attend: Attend) -> Tensor:
        row = plan_row(
            SinkWindow(2, 4),
            sink_capacity=2,
            slot=0,
            source_len=3,
            written=0,
            span=self.span,
            source=self.source,
        )
        return attend(
            self.q,
            self.k,
            self.v,
            self.slots,
            StepPlan.of([row]),
            sources=self.sources,
            row_sources=self.row_sources,
            rel_bias=self.rel_bias,
        )


def test_the_valid_step_is_valid(attend: Attend) -> None:
    assert OneStep().run(attend).isfinite().all()
    assert OneStep(rel_bias=torch.zeros(1, 2, 2, 3 + 3)).run(attend).isfinite().all()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (OneStep(q=torch.randn(2, 2, 2, 4)), "q must have len.* = 1 rows, got 2"),
        (OneStep(k=torch.randn(1, 1, 3, 4)), "k must be"),
        (OneStep(v=torch.randn(1, 2, 2, 4)), "v must be"),
        (OneStep(slots=torch.randn(2, 1, 1, 6, 6)), "slots must end in 2D = 8, got 6"),
        (OneStep(sources=None), "sources must be given"),
        (OneStep(source=-1), "row_sources must be given"),
        (
            OneStep(row_sources=torch.zeros(1, 2, 2, 6)),
            r"row_sources must be \(1, 1, 1, 0, 8\) or longer, got \(1, 2, 2, 6\)",
        ),
        (
            OneStep(sources=torch.randn(1, 1, 1, 2, 8)),
            r"sources must be \(1, 1, 1, 3, 8\) or longer, got \(1, 1, 1, 2, 8\)",
        ),
        (
            OneStep(row_sources=torch.zeros(2, 1, 1, 3, 8)),
            r"row_sources must be \(1, 1, 1, 0, 8\) or longer, got \(2, 1, 1, 3, 8\)",
        ),
        (OneStep(span=3), "must add at most T = 2 tokens a row, got 3"),
        (OneStep(rel_bias=torch.zeros(1, 2, 2, 5)), "rel_bias must be"),
    ],
)
def test_what_does_not_fit_is_refused_and_stores_nothing(
    attend: Attend, step: OneStep, message: str
) -> None:
    before = step.slots.clone()
    with pytest.raises(ValueError, match=message):
        step.run(attend)
    assert torch.equal(step.slots.isnan(), before.isnan())


def test_heads_must_divide(attend: Attend) -> None:
    q, kv = torch.randn(1, 3, 1, 4), torch.randn(1, 2, 1, 4)
    with pytest.raises(ValueError, match="H must be a multiple of H_kv = 2, got 3"):
        attend(q, kv, kv, torch.zeros(1, 1, 2, 6, 8), StepPlan(1))


def test_a_store_leaves_no_gradient_behind(attend: Attend) -> None:
    step = OneStep()
    step.k.requires_grad_()
    step.v.requires_grad_()
    step.run(attend).sum().backward()
    assert step.k.grad is not None and step.v.grad is not None
    assert not step.slots.requires_grad


def test_a_bias_of_what_is_not_seen_may_be_anything(attend: Attend) -> None:
    """Entry 0 is the first query's distance to a token after it."""
    q, kv, slots = torch.randn(1, 2, 2, 4), torch.randn(1, 1, 2, 4), torch.zeros(1, 1, 1, 6, 8)
    bias = torch.randn(1, 2, 2, 3)
    bias[..., 0] = torch.nan
    out = attend(q, kv, kv, slots, StepPlan(1), query_window=4, rel_bias=bias)
    assert out.isfinite().all()


def one_row(written: int, span: int = 1) -> StepPlan:
    row = plan_row(
        SinkWindow(2, 5), sink_capacity=2, slot=0, source_len=0, written=written, span=span
    )
    return StepPlan.of([row])


def a_step(seed: int, rows: int = 1) -> list[Tensor]:
    """Queries, keys, values and slots of a step of one token and two heads."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, 2, 1, 4)] * 3 + [(rows, 1, 2, 7, 8)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_gradients_of_layers_that_share_a_step(attend: Attend) -> None:
    """What one call gathers must not be overwritten by the next before it has been used."""
    given, plan = [a_step(seed) for seed in (0, 1)], one_row(20)
    for q, k, v, _ in given:
        for tensor in (q, k, v):
            tensor.requires_grad_()
    outs = [attend(q, k, v, slots.clone(), plan) for q, k, v, slots in given]
    sum(out.square().sum() for out in outs).backward()
    for q, k, v, slots in given:
        copies = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
        reference.attend(*copies, slots.double(), plan).square().sum().backward()
        for tensor, copy in zip((q, k, v), copies, strict=True):
            assert tensor.grad is not None and copy.grad is not None
            assert torch.allclose(tensor.grad.double(), copy.grad, atol=1e-5)


def test_modes_and_threads_do_not_disturb_each_other(attend: Attend) -> None:
    plan, given = one_row(20), [a_step(seed) for seed in range(8)]
    wanted = [attend(q, k, v, slots.clone(), plan) for q, k, v, slots in given]

    def again(index: int) -> Tensor:
        q, k, v, slots = given[index % len(given)]
        with torch.inference_mode(index % 3 == 0), torch.set_grad_enabled(index % 2 == 0):
            return attend(q, k, v, slots.clone(), plan).clone()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(again, range(400)))
    for index, result in enumerate(results):
        assert torch.equal(result, wanted[index % len(given)])


def test_steps_take_no_new_memory_for_what_they_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, slots = a_step(0)
    plan = one_row(20)
    cpu.attend(q, k, v, slots, plan)
    made = []
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a))
    monkeypatch.setattr(Tensor, "index_select", lambda *a: made.append(a))
    cpu.attend(q, k, v, slots, plan)
    assert not made
