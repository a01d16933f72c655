"""Engines of other configurations: each needs one of its own, so each test does a lot with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_llama import random_prompt
from support.engine import Ask, Engine, expect_exact
from support.oracle_llama import OracleLlama
from vllm_bounded_kv import SinkWindow


@contextmanager
def an_engine(model: Path, bounded: dict[str, Any], **kwargs: Any) -> Iterator[Engine]:
    engine = Engine(model, {"positions": "absolute", **bounded}, **kwargs)
    try:
        yield engine
    finally:
        engine.close()


def asks_around(sink: int, window: int, **kwargs: Any) -> list[Ask]:
    lengths = (1, sink + window - 1, sink + window, sink + window + 1, 4 * (sink + window))
    return [Ask(random_prompt(n, seed=n), max_tokens=60, **kwargs) for n in lengths]


def test_a_seed_says_the_same_however_its_prompt_is_cut(tiny_model: Path) -> None:
    """Samples after a part of the prompt are discarded, and must leave the generator alone."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, seed=11, max_tokens=40, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    said = []
    with an_engine(tiny_model, {"sink": 4, "window": 60, "positions": "absolute"}) as engine:
        for chunk in (None, 7, 50):
            with engine.chunk(chunk):
                prompts = [{"prompt_token_ids": random_prompt(n, seed=n)} for n in (5, 300)]
                outputs = engine.llm.generate(prompts, [greedy, params], use_tqdm=False)
            said.append(list(outputs[1].outputs[0].token_ids))
    assert said[0] == said[1] == said[2]


@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None,
    reason="torch.compile needs a C++ compiler",
)
def test_compiled(tiny_model: Path, oracle: OracleLlama) -> None:
    with an_engine(tiny_model, {"sink": 3, "window": 61}, enforce_eager=False) as engine:
        for chunk in (None, 40):
            engine.forget_prefixes()
            asks = asks_around(3, 61)
            for ask, answer in zip(asks, engine.run(asks, chunk=chunk), strict=True):
                expect_exact(oracle, ask, answer, 3, 61)


@pytest.mark.parametrize("block_size", [64, 128])
def test_block_sizes(tiny_model: Path, oracle: OracleLlama, block_size: int) -> None:
    policy = {"sink": 20, "window": 130}
    with an_engine(tiny_model, policy, block_size=block_size) as engine:
        asks = asks_around(20, 130)
        for ask, answer in zip(asks, engine.run(asks, chunk=200), strict=True):
            expect_exact(oracle, ask, answer, 20, 130)


def test_window_beside_the_step(tiny_model: Path, oracle: OracleLlama) -> None:
    """Without `window_includes_step` a query keeps one entry more."""
    policy = {"sink": 4, "window": 63, "window_includes_step": False}
    with an_engine(tiny_model, policy) as engine:
        assert engine.scheduler.slot_blocks == 3  # 4 + 64 entries
        asks = asks_around(4, 63)
        for ask, answer in zip(asks, engine.run(asks, chunk=33), strict=True):
            expect_exact(oracle, ask, answer, 4, 63, includes_step=False)


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_the_shortest_drafts(tiny_model: Path, oracle: OracleLlama, num_drafts: int) -> None:
    """Of one token: they need no spare entry, and leave steps of one token to vLLM's kernel."""
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
    with an_engine(
        tiny_model, {"sink": 4, "window": 60}, speculative_config=drafts, max_model_len=1024
    ) as engine:
        assert engine.scheduler.slot_blocks == 2 + (num_drafts > 1)
        asks = asks_around(4, 60)
        for ask, answer in zip(asks, engine.run(asks, chunk=50), strict=True):
            expect_exact(oracle, ask, answer, 4, 60)


def retention_by_source(source_len: int) -> SinkWindow:
    """Half the source for the sink, and a window that shrinks as the source grows."""
    return SinkWindow(source_len // 2, 70 - source_len, window_includes_step=True)


def test_retention_callable(tiny_model: Path, oracle: OracleLlama) -> None:
    policy = {"retention": f"{__name__}:retention_by_source", "max_source_len": 64}
    with an_engine(tiny_model, policy) as engine:
        for source_len in (0, 10, 64):
            ask = Ask(random_prompt(150, seed=source_len), 50, {"kv_source_len": source_len})
            (answer,) = engine.run([ask])
            expect_exact(oracle, ask, answer, source_len // 2, 70 - source_len)


def test_without_prefix_caching(tiny_model: Path, oracle: OracleLlama) -> None:
    policy = {"sink": 40, "window": 50}
    with an_engine(tiny_model, policy, enable_prefix_caching=False) as engine:
        asks = [Ask(random_prompt(100, seed=1), 60)] * 2
        for ask, answer in zip(asks, engine.run(asks), strict=True):
            assert answer.num_cached == 0
            expect_exact(oracle, ask, answer, 40, 50)


def test_a_full_pool_makes_requests_wait_for_a_whole_slot(
    tiny_model: Path, oracle: OracleLlama
) -> None:
    block_bytes = 3 * 2 * 2 * 32 * 32 * 4  # layers, key and value, heads, head size, entries, fp32
    slot_blocks = 4
    pool = block_bytes * (2 * slot_blocks + 3)  # two slots, three blocks too many, one null block
    policy = {"sink": 4, "window": 120}
    with an_engine(tiny_model, policy, kv_cache_memory_bytes=pool) as engine:
        assert engine.scheduler.num_slots == 2
        running = []
        asks = [Ask(random_prompt(10 + i, seed=i), 200) for i in range(5)]
        answers = engine.run(asks, on_step=lambda _: running.append(len(engine.scheduler.running)))
        assert max(running) == 2
        for ask, answer in zip(asks, answers, strict=True):
            expect_exact(oracle, ask, answer, 4, 120)


def test_lengths_far_beyond_the_pool(tiny_model: Path, oracle: OracleLlama) -> None:
    """The length limit does not size anything: 8,192 positions through a pool of 320 entries."""
    block_bytes = 3 * 2 * 2 * 32 * 32 * 4
    policy = {"sink": 4, "window": 60}
    with an_engine(
        tiny_model, policy, kv_cache_memory_bytes=10 * block_bytes, max_model_len=8192
    ) as engine:
        ask = Ask(random_prompt(3000, seed=9), 100)
        (answer,) = engine.run([ask], chunk=512)
        expect_exact(oracle, ask, answer, 4, 60)
