"""Streams whose rotary positions fall back, in engines of other configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tiny_llama import TinyLlama, cached_tiny_llama, random_prompt
from engine.rebasing import (
    CAPACITY,
    LARGEST,
    LIMIT,
    MAX_SOURCE,
    OVER_SOURCE,
    PERIOD,
    POLICY,
    SINK,
    WINDOW,
)
from support.engine import Ask, Engine, expect_exact
from support.oracle_llama import OracleLlama, Rebase, bounded_mask


@pytest.mark.parametrize("limit", [LARGEST + 1, LARGEST + 9, None])
def test_limits(tiny_model: Path, oracle: OracleLlama, limit: int | None) -> None:
    """From a period of one token to the default; far beyond what the model knows."""
    engine = Engine(
        tiny_model,
        {**POLICY, "position_limit": limit},
        max_model_len=2_000_000,
        max_num_seqs=4,
    )
    try:
        policy = engine.scheduler.bounded_policy
        assert (policy.positions, policy.position_limit) == ("rebase", limit or 4 * LARGEST)
        asks = [
            Ask(random_prompt(n, seed=n), max_tokens=80, args=args)
            for n, args in ((100, OVER_SOURCE), (4 * LARGEST + 90, OVER_SOURCE), (700, {}))
        ]
        sinks = [MAX_SOURCE, MAX_SOURCE, SINK]
        for chunk in (40, None):
            engine.forget_prefixes()
            for ask, answer, sink in zip(asks, engine.run(asks, chunk=chunk), sinks, strict=True):
                expect_exact(oracle, ask, answer, sink, WINDOW, limit=policy.position_limit)
    finally:
        engine.close()


KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tiny_model: Path, oracle: OracleLlama, dtype: str) -> None:
    """As near the oracle as the same dtype is without any boundary."""
    engine = Engine(tiny_model, {**POLICY, "position_limit": LIMIT}, dtype=dtype)
    try:
        errors = []
        for max_tokens in (LIMIT - 50, LIMIT + 2 * PERIOD):
            ask = Ask(random_prompt(40, seed=3), max_tokens=max_tokens)
            (answer,) = engine.run([ask])
            tokens = [*ask.prompt, *answer.tokens]
            table = oracle.logprobs(
                tokens,
                bounded_mask(len(tokens), SINK, WINDOW),
                rebase=Rebase(SINK, CAPACITY, LIMIT),
            )[len(ask.prompt) - 1 : -1]
            chosen = table.gather(1, torch.tensor(answer.tokens)[:, None]).squeeze(1)
            errors.append((chosen - torch.tensor(answer.logprobs)).abs().mean())
        assert errors[1] < 1.5 * errors[0]
    finally:
        engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_kinds(tmp_path: Path, kind: str) -> None:
    scaling = tuple({"rope_type": kind, **KINDS[kind]}.items())
    model = cached_tiny_llama(tmp_path, TinyLlama(rope_scaling=scaling))
    oracle = OracleLlama.from_folder(model)
    engine = Engine(model, {**POLICY, "position_limit": LIMIT}, max_model_len=100_000)
    try:
        asks = [Ask(random_prompt(n, seed=n), max_tokens=150) for n in (30, 190, 900)]
        for ask, answer in zip(asks, engine.run(asks, chunk=150), strict=True):
            expect_exact(oracle, ask, answer, SINK, WINDOW, limit=LIMIT)
    finally:
        engine.close()


def test_compiled(tiny_model: Path, oracle: OracleLlama) -> None:
    engine = Engine(tiny_model, {**POLICY, "position_limit": LIMIT}, enforce_eager=False)
    try:
        asks = [Ask(random_prompt(n, seed=n), max_tokens=300) for n in (20, 190, 900)]
        for ask, answer in zip(asks, engine.run(asks, chunk=150), strict=True):
            expect_exact(oracle, ask, answer, SINK, WINDOW, limit=LIMIT)
    finally:
        engine.close()
