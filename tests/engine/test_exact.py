"""The engine's tokens against the float64 oracle with the retention's mask.

Free blocks are NaN throughout, the pool is checked after every step, and all blocks must be back
at the end (see `support.engine`).
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.tiny_llama import random_prompt
from engine.conftest import SINK, WINDOW
from support.engine import Ask, Engine, expect_exact, judge
from support.oracle_llama import OracleLlama

BLOCK = 32
CAPACITY = SINK + WINDOW

# Around the sink, the slot's end and far beyond.
PROMPT_LENS = [
    1,
    SINK - 1,
    SINK,
    SINK + 1,
    CAPACITY - 1,
    CAPACITY,
    CAPACITY + 1,
    5 * CAPACITY,
]
CHUNKS = [1, 7, BLOCK, WINDOW + 30, None]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("prompt_len", PROMPT_LENS)
def test_prompt_lengths_and_chunks(
    engine: Engine, oracle: OracleLlama, prompt_len: int, chunk: int | None
) -> None:
    ask = Ask(random_prompt(prompt_len, seed=prompt_len), max_tokens=24)
    (answer,) = engine.run([ask], chunk=chunk)
    expect_exact(oracle, ask, answer, SINK, WINDOW)


def test_decode_past_five_wraps(engine: Engine, oracle: OracleLlama) -> None:
    ask = Ask(random_prompt(20, seed=1), max_tokens=6 * WINDOW)
    (answer,) = engine.run([ask])
    expect_exact(oracle, ask, answer, SINK, WINDOW)


@pytest.mark.parametrize("sink", [0, 1, 31, 32, 33])
def test_windows_and_sinks_around_block_borders(
    engine: Engine, oracle: OracleLlama, sink: int
) -> None:
    asks = [
        Ask(
            random_prompt(length, seed=length),
            max_tokens=40,
            args={"kv_sink": sink, "kv_window": window},
        )
        for window in (1, 2, 31, 32, 33, 63, 64, 65, WINDOW - 1, WINDOW)
        for length in (3, sink + window, 150)
    ]
    for ask, answer in zip(asks, engine.run(asks, chunk=50), strict=True):
        expect_exact(oracle, ask, answer, sink, ask.args["kv_window"])


@pytest.mark.parametrize("chunk", [13, 64, None])
def test_eight_mixed_requests(engine: Engine, oracle: OracleLlama, chunk: int | None) -> None:
    policies = [(5, 96), (0, 33), (40, 64), (96, 96), (1, 1), (32, 32), (7, 50), (64, 17)]
    asks = [
        Ask(
            random_prompt(11 + 37 * i, seed=i),
            max_tokens=30 + 11 * i,
            args={"kv_sink": sink, "kv_window": window},
        )
        for i, (sink, window) in enumerate(policies)
    ]
    answers = engine.run(asks, chunk=chunk)
    for ask, answer, (sink, window) in zip(asks, answers, policies, strict=True):
        expect_exact(oracle, ask, answer, sink, window)


def test_batched_equals_solo(engine: Engine) -> None:
    asks = [Ask(random_prompt(30 + 40 * i, seed=50 + i), max_tokens=60) for i in range(5)]
    batched = engine.run(asks, chunk=64)
    for ask, together in zip(asks, batched, strict=True):
        engine.forget_prefixes()
        (alone,) = engine.run([ask])
        assert alone.tokens == together.tokens


def test_forced_preemption_recomputes_exactly(engine: Engine, oracle: OracleLlama) -> None:
    def preempt(step: int) -> None:
        if step in (4, 30, 90):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    asks = [Ask(random_prompt(n, seed=n), max_tokens=120) for n in (10, 90, 260)]
    answers = engine.run(asks, chunk=70, on_step=preempt)
    for ask, answer in zip(asks, answers, strict=True):
        expect_exact(oracle, ask, answer, SINK, WINDOW)


def test_abort_in_mid_prefill_frees_the_slot(engine: Engine, oracle: OracleLlama) -> None:
    victim = Ask(random_prompt(2000, seed=3), max_tokens=10)
    survivor = Ask(random_prompt(40, seed=4), max_tokens=50)
    with engine.chunk(48):
        victim_id, _ = engine.add(victim), engine.add(survivor)

        def abort(step: int) -> None:
            if step == 6:
                engine.engine.abort_request([victim_id], internal=True)

        finals = engine.drain(on_step=abort)
    (answer,) = finals.values()
    expect_exact(oracle, survivor, answer, SINK, WINDOW)


def test_a_reused_slot_shows_nothing_of_its_last_owner(engine: Engine, oracle: OracleLlama) -> None:
    for seed in range(3):
        ask = Ask(random_prompt(130 + seed, seed=seed), max_tokens=50)
        (answer,) = engine.run([ask], poison=seed > 0)
        expect_exact(oracle, ask, answer, SINK, WINDOW)


@pytest.mark.parametrize(
    ("sink", "window"), [(SINK - 1, WINDOW), (SINK, WINDOW + 1), (SINK, WINDOW - 1)]
)
def test_control_another_mask_is_noticed(
    engine: Engine, oracle: OracleLlama, sink: int, window: int
) -> None:
    """The comparison can fail: an oracle that is off by one entry disagrees."""
    ask = Ask(random_prompt(20, seed=1), max_tokens=2 * CAPACITY)
    (answer,) = engine.run([ask])
    assert not judge(oracle, ask, answer, sink, window).exact


def test_control_poison_is_read_when_blocks_are_not_cleared(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The NaN in free blocks does bite: without the clearing, it reaches the output."""
    from vllm_bounded_kv.engine.metadata import BoundedCPUMetadataBuilder

    build = BoundedCPUMetadataBuilder.build

    def build_without_clearing(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        metadata = build(self, *args, **kwargs)
        metadata.new_partial_blocks = None
        return metadata

    monkeypatch.setattr(BoundedCPUMetadataBuilder, "build", build_without_clearing)
    (answer,) = engine.run([Ask(random_prompt(10, seed=5), max_tokens=4)])
    assert not torch.tensor(answer.logprobs).isfinite().all()
