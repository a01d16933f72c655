"""Whole engines on a GPU, where there is one: `scripts/gpu-check` runs this. Nobody has yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.tiny_llama import random_prompt
from support.engine import Ask, Engine, expect_exact
from support.oracle_llama import OracleLlama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SINK, WINDOW, LIMIT = 5, 60, 150
LENGTH = LIMIT + 3 * (LIMIT - SINK - WINDOW)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_mixed_requests_equal_the_oracle(
    tiny_model: Path, oracle: OracleLlama, eager: bool, limit: int | None
) -> None:
    positions = {"positions": "absolute"} if limit is None else {"position_limit": limit}
    policy = {"sink": SINK, "window": WINDOW, "max_source_len": 64, **positions}
    engine = Engine(tiny_model, policy, enforce_eager=eager, max_model_len=1024)
    try:
        source = {"kv_source_len": 64}
        shared = random_prompt(64, seed=9)
        lengths = (3, WINDOW + 20, LIMIT + 40)
        asks = [Ask(random_prompt(n, seed=n), LENGTH - n) for n in lengths]
        asks += [Ask(shared + random_prompt(n, seed=n), 200, source) for n in (4, 7)]
        for chunk in (None, 48):
            for ask, answer in zip(asks, engine.run(asks, chunk=chunk), strict=True):
                sink = 64 if ask.args else SINK
                expect_exact(oracle, ask, answer, sink, WINDOW, limit=limit)
        engine.check_all_free()
    finally:
        engine.close()
