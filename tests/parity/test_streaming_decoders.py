"""Three decoders served from slot pools equal themselves over explicit caches, at every step.

Streams come, go and take over slots full of NaN; batches mix ages, sources, spans and padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from examples.streaming_decoders import conformer, flow_matching, mimi
from examples.streaming_decoders.explicit import ExplicitCache
from examples.streaming_decoders.traffic import Traffic
from vllm_bounded_kv import BoundedKVSpec, SinkWindow, rows
from vllm_bounded_kv.manager import BoundedKVManager

TOLERANCE = 1e-11
"""Of float64 outputs of the order of 1, through all layers and Euler steps."""
NUM_STEPS = 90


def flow(retention: Any, seed: int) -> Traffic[Any]:
    return flow_matching.traffic(
        flow_matching.FlowDecoder(seed), flow_matching.spec_of(retention), seed
    )


DECODERS: dict[str, Callable[[int], Traffic[Any]]] = {
    "mimi": lambda seed: mimi.traffic(mimi.small_mimi(seed), seed),
    "flow matching": lambda seed: flow(flow_matching.voice_and_window, seed),
    # Parts of a voice are in the sink, in the window, and forgotten.
    "flow matching, no voice kept": lambda seed: flow(SinkWindow(5, 13, True), seed),
    "flow matching, window apart": lambda seed: flow(SinkWindow(0, 17), seed),
    "conformer": lambda seed: conformer.traffic(conformer.Conformer(seed), seed),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("decoder", DECODERS)
def test_every_step_equals_explicit_caches(decoder: str, seed: int) -> None:
    traffic = DECODERS[decoder](seed).run(NUM_STEPS)
    assert [step.error for step in traffic.steps if not step.error <= TOLERANCE] == []
    config = traffic.pooled.managers[0].config
    assert traffic.longest > 4 * config.max_retained, "fewer than three wraps"
    assert traffic.num_opened > 3 * config.max_slots, "slots are hardly used again"
    assert {step.num_streams for step in traffic.steps} == set(range(1, config.max_slots + 1))


# --- controls: these tests can fail


def fails(traffic: Traffic[Any]) -> bool:
    """Whether the two ways differ by far more than rounding."""
    return traffic.run(25).worst > 1e-3


SPOILED = [(decoder, field) for decoder in DECODERS for field in ("window", "step_share")]


@pytest.mark.parametrize(
    ("decoder", "field"), [*SPOILED, ("flow matching", "sink"), ("conformer", "sink")]
)
def test_control_a_wrong_plan_is_noticed(
    monkeypatch: pytest.MonkeyPatch, decoder: str, field: str
) -> None:
    of = rows.Policies.of

    def wrong(config: Any) -> rows.Policies:
        policies = of(config)
        getattr(policies, field)[:] += 1 if field == "step_share" else -1
        return policies

    monkeypatch.setattr("vllm_bounded_kv.manager.Policies.of", wrong)
    assert fails(DECODERS[decoder](0))


@pytest.mark.parametrize("decoder", DECODERS)
def test_control_a_wrong_mask_is_noticed(monkeypatch: pytest.MonkeyPatch, decoder: str) -> None:
    mask = ExplicitCache._mask

    def narrower(cache: ExplicitCache, *args: int) -> Any:
        one_less = replace(cache.retention, window=cache.retention.window - 1)
        query_window = cache.query_window and cache.query_window - 1
        return mask(ExplicitCache(cache.entries, one_less, query_window), *args)

    monkeypatch.setattr(ExplicitCache, "_mask", narrower)
    assert fails(DECODERS[decoder](0))


@pytest.mark.parametrize("decoder", DECODERS)
def test_control_a_missing_commit_is_noticed(decoder: str) -> None:
    traffic = DECODERS[decoder](0)
    traffic.pooled.managers[-1].commit = lambda step: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="written must be what was committed, 0, got"):
        traffic.run(25)


def test_control_the_order_of_joining_is_noticed() -> None:
    spec = flow_matching.spec_of()
    in_order = BoundedKVSpec(replace(spec.config, reverse_step_order=False))
    assert fails(flow_matching.traffic(flow_matching.FlowDecoder(), in_order))


def test_control_a_shifted_bias_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = BoundedKVManager.attend

    def shifted(*args: Any, rel_bias: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return attend(*args, rel_bias=rel_bias.roll(1, dims=3), **kwargs)

    monkeypatch.setattr(BoundedKVManager, "attend", shifted)
    assert fails(DECODERS["conformer"](0))


def test_control_an_old_convolution_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beside the pool is the module's to clear."""
    slots = conformer.PooledConformer._slots

    def not_cleared(pooled: conformer.PooledConformer, chunks: Any) -> torch.Tensor:
        left = pooled.left.clone()
        found = slots(pooled, chunks)
        pooled.left.copy_(left)
        return found

    monkeypatch.setattr(conformer.PooledConformer, "_slots", not_cleared)
    assert fails(DECODERS["conformer"](0))
