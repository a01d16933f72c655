"""The quality benchmark reads a text through vLLM and gets the oracle's likelihoods."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quality import engine as quality
from benchmarks.quality.schemes import Scheme, schemes
from benchmarks.tiny_llama import random_prompt
from support.engine import LOGPROB_TOL
from support.oracle_llama import OracleLlama, Rebase, bounded_mask, full_mask
from vllm_bounded_kv.positions import LIMIT_IN_CAPACITIES

SINK, WINDOW, LIMIT = 5, 60, 140
NUM_TOKENS = 1000
BOUNDARIES = (NUM_TOKENS - SINK - WINDOW) // (LIMIT - SINK - WINDOW)
TOKENS = random_prompt(NUM_TOKENS, seed=11)


def expected(oracle: OracleLlama, scheme: Scheme) -> torch.Tensor:
    """`[n - 1]` float64, in nats."""
    n = NUM_TOKENS - 1
    rebase = None
    if scheme.limit is not None:
        rebase = Rebase(scheme.sink, scheme.sink + scheme.window, scheme.limit)
    mask = full_mask(n)
    if scheme.kind != "full":
        mask = bounded_mask(n, scheme.sink, scheme.window)
    rows = oracle.logprobs(TOKENS[:-1], mask, rebase=rebase)
    return -rows.gather(1, torch.tensor(TOKENS[1:])[:, None]).squeeze(1)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("full"),
        Scheme("window", 0, WINDOW),
        Scheme("absolute", SINK, WINDOW),
        Scheme("rebase", SINK, WINDOW, LIMIT),
    ],
    ids=lambda scheme: scheme.kind,
)
def test_scored_through_vllm(
    tiny_model: Path, oracle: OracleLlama, scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BOUNDARIES > 10
    monkeypatch.setattr(quality, "CHUNK", 128)
    seen: list[int] = []
    options = quality.engine_options(scheme, str(tiny_model), NUM_TOKENS)
    nats = quality.score(options, TOKENS, seen.append)
    assert nats.shape == (NUM_TOKENS - 1,)
    assert np.abs(nats - expected(oracle, scheme).numpy()).max() < LOGPROB_TOL
    assert seen == sorted(seen) and seen[-1] == NUM_TOKENS - 1 and len(seen) >= NUM_TOKENS // 128
    # What the test tells apart: another scheme of the same sizes is elsewhere.
    other = Scheme("rebase", SINK, WINDOW, LIMIT + 1)
    assert np.abs(nats - expected(oracle, other).numpy()).max() > 10 * LOGPROB_TOL


def test_the_default_limit_is_the_engines() -> None:
    *_, last = schemes(["rebase"], [(4, 60), (8, 92)], [1024])
    assert last == Scheme("rebase", 8, 92, LIMIT_IN_CAPACITIES * 100)


def test_positions_beyond_the_models_get_a_table(tiny_model: Path) -> None:
    """Of as many rows as the stream has positions; where they fall back, the model's own do."""
    for scheme, is_longer in (
        (Scheme("full"), True),
        (Scheme("absolute", 4, 60), True),
        (Scheme("rebase", 4, 60, 1024), False),
        (Scheme("window", 0, 64), False),
    ):
        options = quality.engine_options(scheme, str(tiny_model), 20_000)
        assert ("hf_overrides" in options) == is_longer, scheme
