"""Streams whose rotary positions fall back, against the oracle that applies `v(p)` as defined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tiny_llama import random_prompt
from engine.rebasing import CAPACITY, LIMIT, MAX_SOURCE, OVER_SOURCE, PERIOD, POLICY, SINK, WINDOW
from support.engine import Ask, Engine, expect_exact, judge
from support.oracle_llama import OracleLlama
from vllm_bounded_kv.engine import backend

PROMPT_LENS = [1, CAPACITY, LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + PERIOD, LIMIT + 5 * PERIOD]
CHUNKS = [1, 7, 32, 2 * PERIOD, None]


@pytest.fixture(scope="module")
def rebasing_engine(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine(tiny_model, {**POLICY, "position_limit": LIMIT})
    yield engine
    engine.close()


@pytest.fixture
def engine(rebasing_engine: Engine) -> Iterator[Engine]:
    rebasing_engine.forget_prefixes()
    yield rebasing_engine
    rebasing_engine.check_all_free()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("prompt_len", PROMPT_LENS)
def test_prompt_lengths_and_chunks(
    engine: Engine, oracle: OracleLlama, prompt_len: int, chunk: int | None
) -> None:
    ask = Ask(random_prompt(prompt_len, seed=prompt_len), max_tokens=24)
    (answer,) = engine.run([ask], chunk=chunk)
    expect_exact(oracle, ask, answer, SINK, WINDOW, limit=LIMIT)


def test_decoding_through_four_boundaries(engine: Engine, oracle: OracleLlama) -> None:
    ask = Ask(random_prompt(20, seed=1), max_tokens=LIMIT + 4 * PERIOD)
    (answer,) = engine.run([ask])
    expect_exact(oracle, ask, answer, SINK, WINDOW, limit=LIMIT)


@pytest.mark.parametrize("chunk", [13, 64, None])
def test_eight_mixed_requests(engine: Engine, oracle: OracleLlama, chunk: int | None) -> None:
    """Each with a period of its own."""
    policies = [(5, 60), (0, 33), (40, 50), (64, 60), (1, 1), (32, 32), (7, 50), (64, 17)]
    asks = [
        Ask(
            random_prompt(11 + 67 * i, seed=i),
            max_tokens=130 + 31 * i,
            args={"kv_sink": sink, "kv_window": window},
        )
        for i, (sink, window) in enumerate(policies)
    ]
    for ask, answer, policy in zip(asks, engine.run(asks, chunk=chunk), policies, strict=True):
        expect_exact(oracle, ask, answer, *policy, limit=LIMIT)


def test_a_shared_source_does_not_turn(engine: Engine, oracle: OracleLlama) -> None:
    """Streams over it stand at different positions, and a late one hits it unharmed."""
    source = random_prompt(MAX_SOURCE, seed=7)
    asks = [
        Ask(source + random_prompt(n, seed=n), max_tokens=300, args=OVER_SOURCE)
        for n in (3, 150, 400)
    ]
    answers = engine.run(asks)
    late = Ask(source + random_prompt(9, seed=9), max_tokens=60, args=OVER_SOURCE)
    answers += engine.run([late])
    assert [a.num_cached for a in answers] == [0, MAX_SOURCE, MAX_SOURCE, MAX_SOURCE]
    for ask, answer in zip([*asks, late], answers, strict=True):
        expect_exact(oracle, ask, answer, MAX_SOURCE, WINDOW, limit=LIMIT)


@pytest.mark.parametrize("step", [100, 160, 230])
def test_a_preempted_stream_is_recomputed(engine: Engine, oracle: OracleLlama, step: int) -> None:
    def preempt(number: int) -> None:
        if number == step:
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    ask = Ask(random_prompt(20, seed=2), max_tokens=LIMIT + 2 * PERIOD)
    (answer,) = engine.run([ask], on_step=preempt)
    expect_exact(oracle, ask, answer, SINK, WINDOW, limit=LIMIT)


# --- controls: these tests can fail


def turn_nothing(turn: Callable[..., None], cache: torch.Tensor, what: Any) -> None:
    pass


def turn_twice(turn: Callable[..., None], cache: torch.Tensor, what: Any) -> None:
    turn(cache, what)
    turn(cache, what)


def turn_the_sink(turn: Callable[..., None], cache: torch.Tensor, what: Any) -> None:
    """Of the only stream, whose slot begins in the block of its ring's first key."""
    turn(cache, what)
    first = what.slots[:SINK] - SINK
    turn(cache, type(what)(first, replace(what.rotation, which=what.rotation.which[:SINK])))


@pytest.mark.parametrize("wrong", [turn_nothing, turn_twice, turn_the_sink, None])
def test_control_keys_turned_wrongly_are_noticed(
    engine: Engine, oracle: OracleLlama, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    turn = backend.turn
    if wrong is not None:
        monkeypatch.setattr(backend, "turn", lambda cache, what: wrong(turn, cache, what))
    ask = Ask(random_prompt(20, seed=1), max_tokens=LIMIT + 40)
    (answer,) = engine.run([ask])
    report = judge(oracle, ask, answer, SINK, WINDOW, limit=LIMIT)
    assert report.exact == (wrong is None)
