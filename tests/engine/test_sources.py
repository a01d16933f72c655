"""Source prefixes: kept whole, shared as read-only blocks, exact in the very step they appear."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.tiny_llama import random_prompt
from engine.conftest import MAX_SOURCE, WINDOW
from support.engine import LOGPROB_TOL, Ask, Engine, expect_exact
from support.oracle_llama import OracleLlama, bounded_mask, check_tokens

BLOCK = 32
SOURCE = random_prompt(MAX_SOURCE, seed=99)
ARGS: dict[str, Any] = {"kv_source_len": MAX_SOURCE}


def ask_over_source(tail_len: int, max_tokens: int = 30, **kwargs: Any) -> Ask:
    return Ask([*SOURCE, *random_prompt(tail_len, seed=tail_len)], max_tokens, ARGS, **kwargs)


def test_source_is_shared_across_steps(engine: Engine, oracle: OracleLlama) -> None:
    first, second = ask_over_source(20), ask_over_source(31)
    (answer,) = engine.run([first])
    assert answer.num_cached == 0
    expect_exact(oracle, first, answer, MAX_SOURCE, WINDOW)
    (answer,) = engine.run([second])
    assert answer.num_cached == MAX_SOURCE
    expect_exact(oracle, second, answer, MAX_SOURCE, WINDOW)


@pytest.mark.parametrize("tail_len", [3, 250])
def test_source_is_shared_in_the_same_step(
    engine: Engine, oracle: OracleLlama, tail_len: int
) -> None:
    """The second request hits blocks that the first is only writing in that step, whether the
    first's own prefill wraps (250) or not (3)."""
    asks = [ask_over_source(tail_len), ask_over_source(40), ask_over_source(7)]
    answers = engine.run(asks)
    assert [a.num_cached for a in answers] == [0, MAX_SOURCE, MAX_SOURCE]
    for ask, answer in zip(asks, answers, strict=True):
        expect_exact(oracle, ask, answer, MAX_SOURCE, WINDOW)


def test_shared_blocks_are_the_same_and_counted_once(engine: Engine) -> None:
    seen: list[dict[str, Any]] = []

    def look(step: int) -> None:
        seen.append(engine.scheduler.bounded_kv_figures())

    engine.run([ask_over_source(5), ask_over_source(6)], on_step=look)
    figures = seen[2]
    assert figures["slots_used"] == 2
    assert figures["source_blocks_held"] == MAX_SOURCE // BLOCK
    assert figures["source_blocks_shared"] == MAX_SOURCE // BLOCK
    slot = (MAX_SOURCE + WINDOW) // BLOCK
    held = figures["pool_blocks"] - figures["pool_blocks_free"]
    assert held == 2 * slot - MAX_SOURCE // BLOCK


def test_a_smaller_sink_shares_only_its_own_blocks(engine: Engine, oracle: OracleLlama) -> None:
    """A hit never reaches blocks that the request itself would overwrite."""
    engine.run([ask_over_source(20)])
    ask = Ask([*SOURCE, 70, 71], 120, {"kv_sink": 40, "kv_window": 50})
    (answer,) = engine.run([ask])
    assert answer.num_cached == BLOCK
    expect_exact(oracle, ask, answer, 40, 50)


def test_ring_blocks_are_never_hashed(engine: Engine) -> None:
    prompt = random_prompt(200, seed=8)
    engine.run([Ask(prompt, 10)])
    assert not [b for b in engine.pool.blocks if b.block_hash is not None]
    (answer,) = engine.run([Ask(prompt, 10)])
    assert answer.num_cached == 0


def test_salts_do_not_share(engine: Engine) -> None:
    engine.run([ask_over_source(5, salt="a")])
    answers = engine.run([ask_over_source(9, salt="b"), ask_over_source(9, salt="a")])
    assert [a.num_cached for a in answers] == [0, MAX_SOURCE]


def test_short_source_keeps_the_default_sink(engine: Engine, oracle: OracleLlama) -> None:
    ask = Ask(random_prompt(30, seed=5), 150, {"kv_source_len": 2})
    (answer,) = engine.run([ask])
    expect_exact(oracle, ask, answer, 5, WINDOW)


def test_control_reading_before_writing_is_noticed(
    engine: Engine, oracle: OracleLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the writes after attention, a same-step hit reads blocks not yet written."""
    from vllm_bounded_kv.engine.backend import BoundedCPUAttentionImpl as Impl

    update, stock = Impl.do_kv_cache_update, Impl._attend_stock
    postponed: list[tuple[Any, ...]] = []

    def postpone(self: Any, *args: Any) -> None:
        postponed.append((self, *args))

    def attend_then_write(
        self: Any, layer: Any, query: Any, key: Any, value: Any, *rest: Any
    ) -> None:
        # A row's own new keys must be there; only those of other rows are late.
        stock(self, layer, query, key, value, *rest)
        for call in postponed:
            update(*call)
        postponed.clear()

    monkeypatch.setattr(Impl, "do_kv_cache_update", postpone)
    monkeypatch.setattr(Impl, "_attend_stock", attend_then_write)
    asks = [ask_over_source(3), ask_over_source(40)]
    _, second = engine.run(asks, poison=False)
    report = check_tokens(
        oracle,
        asks[1].prompt,
        second.tokens,
        lambda n: bounded_mask(n, MAX_SOURCE, WINDOW),
        logprobs=second.logprobs,
        logprob_tol=LOGPROB_TOL,
    )
    assert not report.exact
