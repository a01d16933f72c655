"""The Triton kernels equal the float64 oracle: interpreted on a CPU, compiled where a GPU is.

The interpreter takes tens of milliseconds a step, so what a stream holds before the steps under
test is put there by the reference, judged by the same oracle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_attention import SETUPS, OneStep
from test_managed_streams import retentions

from support.interpreted_triton import DEVICE
from support.managed_pool import Case, ManagedPool
from support.slot_pool import Pool, Setup
from vllm_bounded_kv.attention import reference, triton, triton_kernels
from vllm_bounded_kv.config import SinkWindow
from vllm_bounded_kv.layout import plan_row
from vllm_bounded_kv.step_plan import StepPlan

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,  # exp2 of GPUs is good to two units in the last place
    torch.float16: 4e-3,  # one rounding of outputs below 4, and one of every weight
    torch.bfloat16: 3.2e-2,
}
"""Largest absolute error against float64, for unit-normal queries, keys and values."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few dozen keys and queries take several tiles."""
    monkeypatch.setattr(triton, "MAX_KEYS", 16)
    monkeypatch.setattr(triton, "MAX_QUERIES", 32)
    monkeypatch.setattr(triton, "MAX_WIDE_QUERIES", 32)


def split_over(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(triton, "programs_wanted", lambda device: programs)


def played(case: Case, num_steps: int = 1) -> ManagedPool:
    """A pool after `case.num_steps` steps of the reference and then some of Triton."""
    pool = ManagedPool(case, DEVICE, reference.attend).run()
    assert pool.worst <= TOLERANCE[case.dtype]
    pool.kernel = triton.attend
    for _ in range(num_steps):
        pool.churn()
        pool.step()
    return pool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    query_window = draw(st.none() | st.integers(0, 16))
    low = draw(st.integers(0, 3))
    return Case(
        retention=draw(retentions(query_window, largest=12)),
        seed=draw(st.integers(0, 2**32)),
        source_lens=(low, low + draw(st.integers(0, 20))),
        kv_heads=draw(st.sampled_from([1, 1, 1, 2])),
        group=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([16, 32, 64, 80])),
        rows=draw(st.sampled_from([1, 1, 1, 2])),
        reverse=query_window is None and draw(st.booleans()),
        query_window=query_window,
        rel_bias=draw(st.booleans()),
        num_steps=draw(st.integers(0, 8)),
        max_tokens=draw(st.sampled_from([1, 3, 20])),
        dtype=torch.float32,
        max_slots=draw(st.integers(1, 2)),
    )


@pytest.mark.parametrize(("programs", "num_cases"), [(1, 200), (6, 120)], ids=["whole", "split"])
def test_streams_equal_the_oracle(
    monkeypatch: pytest.MonkeyPatch, programs: int, num_cases: int
) -> None:
    split_over(monkeypatch, programs)

    @settings(
        max_examples=num_cases, deadline=None, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(cases())
    def equal(case: Case) -> None:
        assert played(case).worst <= TOLERANCE[torch.float32]

    equal()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["reversed", "query window", "bias", "grouped heads", "policy by source length"]
)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    if DEVICE == "cuda":
        pytest.skip("the pool of these setups lives on a CPU")
    pool = Pool(reference.attend, replace(SETUPS[name], dtype=dtype), seed=4).run(20)
    pool.attend = triton.attend
    assert pool.run(1).worst <= TOLERANCE[dtype]
    assert not pool.slots_differ


@pytest.mark.parametrize(
    ("q", "slot", "source", "own"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16, torch.float32, torch.float16),
    ],
    ids=str,
)
def test_dtypes_may_differ(
    q: torch.dtype, slot: torch.dtype, source: torch.dtype, own: torch.dtype
) -> None:
    """A row over a shared source and one over its own, of other dtypes than slots and queries."""
    policy = SinkWindow(4, 30)
    rows = [
        plan_row(
            policy, sink_capacity=0, slot=s, source_len=20, written=25, span=2, source=from_source
        )
        for s, from_source in ((1, 0), (0, -1))
    ]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    queries = normal(2, 2, 2, 32, dtype=q)
    k, v = normal(2, 1, 2, 32, dtype=q), normal(2, 1, 2, 32, dtype=q)
    slots = normal(2, 1, 1, 30, 64, dtype=slot)
    given: dict[str, Any] = {
        "sources": normal(1, 1, 1, 20, 64, dtype=source),
        "row_sources": normal(2, 1, 1, 20, 64, dtype=own),
    }
    plan = StepPlan.of(rows, DEVICE)
    wanted_slots = slots.clone()
    wanted = reference.attend(queries, k, v, wanted_slots, plan, **given)
    out = triton.attend(queries, k, v, slots, plan, **given)
    assert (out.double() - wanted.double()).abs().max() <= TOLERANCE[q]
    assert torch.equal(slots.view(torch.uint8), wanted_slots.view(torch.uint8))


def test_a_zero_row_reads_and_writes_nothing_and_stays_finite() -> None:
    slots = torch.full((1, 1, 1, 6, 32), torch.nan, device=DEVICE)
    q, k, v = (torch.randn(2, heads, 3, 16, device=DEVICE) for heads in (2, 1, 1))
    out = triton.attend(q, k, v, slots, StepPlan(2, DEVICE))
    assert out.isfinite().all()
    assert slots.isnan().all()


def test_an_empty_step_is_no_error() -> None:
    slots, nothing = torch.zeros(1, 1, 1, 6, 32, device=DEVICE), torch.zeros(0, 1, 3, 16)
    nothing = nothing.to(DEVICE)
    assert triton.attend(nothing, nothing, nothing, slots, StepPlan(0, DEVICE)).shape == (
        *(0, 3, 1, 16),
    )


def test_what_does_not_fit_is_refused_and_stores_nothing() -> None:
    step = OneStep(span=3)
    with pytest.raises(ValueError, match="must add at most T = 2 tokens a row, got 3"):
        step.run(triton.attend)
    assert step.slots.isnan().all()
    step = OneStep(slots=torch.zeros(2, 1, 1, 8, 6).transpose(3, 4))
    with pytest.raises(ValueError, match="slots must have a last axis of stride 1"):
        step.run(triton.attend)


# --- controls: these tests can fail


def test_control_a_read_of_what_was_never_written_is_nan() -> None:
    """So the NaN that fills free slots cannot pass unnoticed."""
    slots = torch.full((1, 1, 1, 7, 32), torch.nan, device=DEVICE)
    row = plan_row(SinkWindow(2, 5), sink_capacity=2, slot=0, source_len=0, written=3, span=0)
    q, k, v = (torch.randn(1, 1, 1, 16, device=DEVICE) for _ in range(3))
    assert triton.attend(q, k, v, slots, StepPlan.of([row], DEVICE)).isnan().all()


@pytest.mark.parametrize(
    ("true", "told"),
    [
        (Setup(SinkWindow(4, 5)), Setup(SinkWindow(4, 4))),
        (Setup(reverse=True), Setup(reverse=False)),
        (Setup(SinkWindow(0, 6), query_window=4), Setup(SinkWindow(0, 6), query_window=3)),
        (Setup(SinkWindow(0, 6), query_window=4), Setup(SinkWindow(0, 6))),
        (Setup(rel_bias=True), Setup(rel_bias=False)),
    ],
    ids=["window", "order", "query", "causal", "bias"],
)
def test_control_every_wrong_option_is_seen(true: Setup, told: Setup) -> None:
    if DEVICE == "cuda":
        pytest.skip("the pool of these setups lives on a CPU")
    true, told = replace(true, dtype=torch.float32), replace(told, dtype=torch.float32)
    pool = Pool(triton.attend, true, seed=0, told=told).run(4)
    assert pool.slots_differ or pool.worst > 0.1


def test_control_writes_before_reads_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing first overwrites what a full window still reads."""
    attend_launches, stores = triton.attend_launches, triton.store_launch

    def swapped(q: Any, k: Any, v: Any, slots: Any, table: Any, *others: Any) -> Any:
        stores(k, v, slots, table, False).run()
        return attend_launches(q, k, v, slots, table, *others)

    case = Case(SinkWindow(2, 4), seed=3, head_dim=16, num_steps=12, dtype=torch.float32)
    assert played(case, 3).worst <= TOLERANCE[torch.float32]
    monkeypatch.setattr(triton, "attend_launches", swapped)
    assert played(case, 3).worst > 0.1


@pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter")
def test_the_interpreter_needs_what_is_put_right() -> None:
    """Else `support.interpreted_triton` has become shorter."""
    import triton.language as tl
    from triton.runtime import interpreter

    value = torch.tensor([1 + 3 / 512])  # between the bfloat16 1 and 1 + 4 / 512, nearer the latter
    cut = interpreter._convert_float(value.numpy(), tl.float32, tl.bfloat16, None)
    assert cut.item() == value.new_ones(1).bfloat16().view(torch.uint16).item()
    assert interpreter._get_np_dtype(tl.bfloat16).name == "uint16"


def test_kernels_are_what_is_tested() -> None:
    """Compiled where there is a GPU, else interpreted."""
    kind = type(triton_kernels.attend_kernel).__name__
    assert kind == ("JITFunction" if DEVICE == "cuda" else "InterpretedFunction")
