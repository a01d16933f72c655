"""Speculative decoding by n-grams: whatever is drafted and taken back, the tokens are exact.

The tiny model repeats itself little, and n-grams of one token match anything: most drafts are
rejected, in mid-ring and before positions fall back. A window of one makes it repeat itself, so
there most are accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.tiny_llama import random_prompt
from engine.rebasing import LIMIT, MAX_SOURCE, OVER_SOURCE, PERIOD, POLICY, SINK, WINDOW
from engine.test_sessions import LIMIT as SESSION_LIMIT
from engine.test_sessions import expect_exact_turns, talk
from support.engine import Ask, Engine, expect_exact, judge
from support.oracle_llama import OracleLlama
from vllm_bounded_kv.engine import scheduler as scheduler_module

NUM_DRAFTS = 4
LENGTH = LIMIT + 2 * PERIOD
SETTINGS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 2 << 20}


def speculative(num_tokens: int) -> dict[str, Any]:
    return {
        "method": "ngram",
        "num_speculative_tokens": num_tokens,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }


@dataclass
class Drafts:
    """Tokens drafted and accepted, and drafts that were cut where positions fall back."""

    proposed: int = 0
    accepted: int = 0
    cut: int = 0


def counting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Drafts:
    drafts, scheduler = Drafts(), engine.scheduler
    make, update = scheduler.make_spec_decoding_stats, scheduler.update_draft_token_ids

    def make_stats(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **rest: Any) -> Any:
        drafts.proposed += num_draft_tokens
        drafts.accepted += num_accepted_tokens
        return make(
            stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            **rest,
        )

    def update_drafts(ids: Any) -> None:
        update(ids)
        for request_id, draft in zip(ids.req_ids, ids.draft_token_ids, strict=True):
            request = scheduler.requests.get(request_id)
            if request is not None and not request.is_prefill_chunk:
                drafts.cut += len(request.spec_token_ids) < len(draft)

    monkeypatch.setattr(scheduler, "make_spec_decoding_stats", make_stats)
    monkeypatch.setattr(scheduler, "update_draft_token_ids", update_drafts)
    return drafts


def test_a_session_whose_turns_end_within_accepted_drafts(
    tiny_model: Path, oracle: OracleLlama
) -> None:
    args = AsyncEngineArgs(
        model=str(tiny_model),
        dtype="float32",
        enforce_eager=True,
        speculative_config=speculative(NUM_DRAFTS),
        additional_config={
            "kv_plugin": "bounded",
            "bounded_kv": {"sink": SINK, "window": WINDOW, "position_limit": SESSION_LIMIT},
        },
        **SETTINGS,
    )

    async def session() -> None:
        llm = AsyncLLM.from_engine_args(args)
        try:
            for sink, window in ((0, 1), (SINK, WINDOW)):
                pieces = [random_prompt(4 + i, seed=i) for i in range(12)]
                turns = await talk(llm, f"s{window}", pieces, 23, kv_sink=sink, kv_window=window)
                expect_exact_turns(oracle, turns, sink, window)
            # Pieces of one token, to and beyond a boundary: vLLM would pad them with drafts.
            pieces = [random_prompt(SESSION_LIMIT - 6, seed=1)]
            pieces += [random_prompt(1, seed=seed) for seed in range(2, 22)]
            turns = await talk(llm, "single", pieces, 1)
            expect_exact_turns(oracle, turns, SINK, WINDOW)
        finally:
            llm.shutdown()

    asyncio.run(session())


@pytest.fixture(scope="module")
def drafting_engine(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine(
        tiny_model,
        {**POLICY, "position_limit": LIMIT},
        speculative_config=speculative(NUM_DRAFTS),
        **SETTINGS,
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(drafting_engine: Engine) -> Iterator[Engine]:
    drafting_engine.forget_prefixes()
    yield drafting_engine
    drafting_engine.check_all_free()


def test_slots_have_room_for_drafts(engine: Engine) -> None:
    spare = NUM_DRAFTS - 1
    assert engine.scheduler.bounded_policy.largest.spare == spare
    assert engine.scheduler.slot_blocks == -(-(MAX_SOURCE + WINDOW + spare) // 32)


@pytest.mark.parametrize("chunk", [40, None])
def test_mixed_requests_past_boundaries(
    engine: Engine, oracle: OracleLlama, monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    drafts = counting(engine, monkeypatch)
    policies = [(SINK, WINDOW), (0, 1), (1, 20), (SINK, 3)]
    asks = [
        Ask(random_prompt(n, seed=n), LENGTH - n, {"kv_sink": sink, "kv_window": window})
        for (sink, window), n in zip(policies, (3, 9, LIMIT + 20, SINK + WINDOW), strict=True)
    ]
    for ask, answer, policy in zip(asks, engine.run(asks, chunk=chunk), policies, strict=True):
        expect_exact(oracle, ask, answer, *policy, limit=LIMIT)
    assert drafts.proposed - drafts.accepted > 300 and drafts.accepted > 100 and drafts.cut > 2


def test_a_source_is_shared_and_a_preempted_stream_recomputed(
    engine: Engine, oracle: OracleLlama
) -> None:
    def preempt(step: int) -> None:
        if step == 60:
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    source = random_prompt(MAX_SOURCE, seed=7)
    asks = [Ask(source + random_prompt(n, seed=n), 2 * WINDOW, OVER_SOURCE) for n in (3, 5)]
    answers = engine.run(asks, on_step=preempt)
    late = Ask(source + random_prompt(9, seed=9), 20, OVER_SOURCE)
    answers += engine.run([late])
    assert answers[-1].num_cached == MAX_SOURCE
    for ask, answer in zip([*asks, late], answers, strict=True):
        expect_exact(oracle, ask, answer, MAX_SOURCE, WINDOW, limit=LIMIT)


@pytest.mark.parametrize("wrong", ["no spare entries", "drafts across boundaries", None])
def test_control_what_drafts_need(
    engine: Engine, oracle: OracleLlama, monkeypatch: pytest.MonkeyPatch, wrong: str | None
) -> None:
    if wrong == "no spare entries":
        builder = engine.runner.attn_groups[0][0].get_metadata_builder()
        monkeypatch.setattr(builder, "spare", 0)
    if wrong == "drafts across boundaries":
        monkeypatch.setattr(scheduler_module, "next_fallback", lambda *_: 10**9)
    ask = Ask(random_prompt(3, seed=3), LENGTH - 3)
    (answer,) = engine.run([ask])
    report = judge(oracle, ask, answer, SINK, WINDOW, limit=LIMIT)
    assert report.exact == (wrong is None)
