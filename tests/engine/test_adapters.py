"""LoRA adapters: each stream is exactly its own model's, and a source is shared within one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_llama import random_prompt
from engine.rebasing import LIMIT, MAX_SOURCE, OVER_SOURCE, PERIOD, POLICY, SINK, WINDOW
from support.adapters import write_adapter
from support.engine import Ask, Engine, expect_exact, judge
from support.oracle_llama import OracleLlama

Model = tuple[Any, OracleLlama]
"""An adapter, `None` for the base model, and its oracle."""

SOURCE = random_prompt(MAX_SOURCE, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, oracle: OracleLlama) -> list[Model]:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [write_adapter(folder / str(seed), oracle, seed) for seed in (1, 2)]
    return [(None, oracle), *adapters]


@pytest.fixture(scope="module")
def adapting_engine(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine(
        tiny_model,
        {**POLICY, "position_limit": LIMIT},
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(adapting_engine: Engine) -> Iterator[Engine]:
    adapting_engine.forget_prefixes()
    yield adapting_engine
    adapting_engine.check_all_free()


@pytest.mark.parametrize("chunk", [50, None])
def test_adapters_and_the_base_model_side_by_side(
    engine: Engine, models: list[Model], chunk: int | None
) -> None:
    """Through several wraps and past a boundary; the base model's rows too."""
    lengths = (3, LIMIT + PERIOD, SINK + WINDOW)
    asks = [
        Ask(random_prompt(n, seed=n), LIMIT + 20, adapter=adapter)
        for (adapter, _), n in zip(models, lengths, strict=True)
    ]
    for ask, answer, (_, oracle) in zip(asks, engine.run(asks, chunk=chunk), models, strict=True):
        expect_exact(oracle, ask, answer, SINK, WINDOW, limit=LIMIT)


def test_a_source_is_shared_within_an_adapter_and_not_between_them(
    engine: Engine, models: list[Model]
) -> None:
    """In the step in which it appears, and later."""
    asks = [
        Ask([*SOURCE, *random_prompt(3 + i, seed=i)], 2 * WINDOW, OVER_SOURCE, adapter=adapter)
        for i, (adapter, _) in enumerate([*models, *models])
    ]
    answers = engine.run(asks)
    assert [answer.num_cached for answer in answers] == [0, 0, 0] + [MAX_SOURCE] * 3
    late = [replace(ask, prompt=[*ask.prompt, 70, 71]) for ask in asks[:3]]
    answers += engine.run(late)
    assert [answer.num_cached for answer in answers[6:]] == [MAX_SOURCE] * 3
    for ask, answer, (_, oracle) in zip([*asks, *late], answers, models * 3, strict=True):
        expect_exact(oracle, ask, answer, MAX_SOURCE, WINDOW, limit=LIMIT)


def test_control_the_models_differ(engine: Engine, models: list[Model]) -> None:
    """Each answer is right for one of them only."""
    asks = [Ask(random_prompt(9, seed=9), 20, adapter=adapter) for adapter, _ in models]
    for i, (ask, answer) in enumerate(zip(asks, engine.run(asks), strict=True)):
        verdicts = [
            judge(oracle, ask, answer, SINK, WINDOW, limit=LIMIT).exact for _, oracle in models
        ]
        assert verdicts == [i == j for j in range(len(models))]


def test_control_stock_vllm_gives_the_base_model_an_adapter(
    engine: Engine, models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why `compat.leave_rows_without_adapter_alone` is there; when this fails, it can go."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for owner in (lora_ops, punica_cpu):
        for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
            monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    asks = [Ask(random_prompt(9, seed=9), 20, adapter=adapter) for adapter, _ in models]
    answer, *_ = engine.run(asks)
    assert not judge(models[0][1], asks[0], answer, SINK, WINDOW, limit=LIMIT).exact
