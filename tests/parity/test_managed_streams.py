"""The manager and its attention equal a float64 list of everything, over the whole contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.managed_pool import Case, ManagedPool
from support.oracle_attention import OracleStream
from vllm_bounded_kv import rows
from vllm_bounded_kv.config import SinkWindow

CASES = 20_000
PARTS = 4
"""One test of them all would come near the time that a test is given."""
TOLERANCE = 1e-12


@st.composite
def retentions(draw: st.DrawFn, query_window: int | None, largest: int = 6) -> Any:
    least = 0 if query_window is None else query_window
    window = draw(st.integers(least, least + largest))
    if query_window is not None:
        return SinkWindow(0, window)
    sink, includes = draw(st.integers(0, largest)), draw(st.booleans())
    if draw(st.booleans()):
        return SinkWindow(sink, window, includes)
    by = draw(st.integers(1, 5))

    def by_length(source_len: int) -> SinkWindow:
        modulus = largest + 1
        return SinkWindow(
            (sink + by * source_len) % modulus, (window + source_len) % modulus, includes
        )

    return by_length


@st.composite
def cases(draw: st.DrawFn, **fixed: Any) -> Case:
    query_window = draw(st.none() | st.integers(0, 5))
    low = draw(st.integers(0, 3))
    return Case(
        **{
            "retention": draw(retentions(query_window)),
            "seed": draw(st.integers(0, 2**32)),
            "source_lens": (low, low + draw(st.integers(0, 5))),
            "kv_heads": draw(st.integers(1, 2)),
            "group": draw(st.integers(1, 2)),
            "rows": draw(st.integers(1, 2)),
            "reverse": query_window is None and draw(st.booleans()),
            "query_window": query_window,
            "rel_bias": draw(st.booleans()),
            "num_steps": draw(st.integers(1, 4)),
            **fixed,
        }
    )


@pytest.mark.parametrize("part", range(PARTS))
@settings(
    max_examples=CASES // PARTS,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=cases())
def test_streams_equal_the_oracle(part: int, case: Case) -> None:
    assert ManagedPool(case).run().worst <= TOLERANCE


@settings(max_examples=40, deadline=None, database=None)
@given(cases(num_steps=60, head_dim=4, max_tokens=9))
def test_long_streams_equal_the_oracle(case: Case) -> None:
    """Through many wraps."""
    assert ManagedPool(case).run().worst <= TOLERANCE


# --- controls: these tests can fail


def shift(name: str, by: int) -> Callable[[Any], None]:
    def spoil(policies: Any) -> None:
        getattr(policies, name)[:] += by

    return spoil


@pytest.mark.parametrize("spoil", [shift("sink", -1), shift("window", -1), shift("step_share", 1)])
def test_control_a_wrong_plan_is_noticed(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    case = Case(SinkWindow(3, 4), seed=1, num_steps=20)
    assert ManagedPool(case).run().worst <= TOLERANCE
    of = rows.Policies.of

    def wrong(config: Any) -> rows.Policies:
        policies = of(config)
        spoil(policies)
        return policies

    monkeypatch.setattr(rows.Policies, "of", wrong)
    with pytest.raises(AssertionError):
        assert ManagedPool(case).run().worst <= TOLERANCE


def test_control_a_wrong_oracle_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OracleStream, "keeps", lambda self, span: [True] * len(self.entries))
    case = Case(SinkWindow(0, 3), seed=1, source_lens=(1, 4), num_steps=20)
    assert ManagedPool(case).run().worst > TOLERANCE
