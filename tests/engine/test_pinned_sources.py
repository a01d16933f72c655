"""Pinned sources in a real engine: held through anything, exact, and gone when let go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_llama import random_prompt
from support.engine import Answer, Ask, Engine, expect_exact
from support.oracle_llama import OracleLlama

SINK, WINDOW, MAX_SOURCE, BLOCK = 5, 40, 96, 32
SLOTS, MAX_PINNED = 3, 8
SLOT_BLOCKS = -(-(MAX_SOURCE + WINDOW) // BLOCK)
SOURCE = random_prompt(MAX_SOURCE, seed=1)


@pytest.fixture(scope="module")
def pinning_engine(tiny_model: Path) -> Iterator[Engine]:
    from support.server import BLOCK_BYTES

    engine = Engine(
        tiny_model,
        {
            "sink": SINK,
            "window": WINDOW,
            "max_source_len": MAX_SOURCE,
            "max_slots": SLOTS,
            "max_pinned_blocks": MAX_PINNED,
            "positions": "absolute",
        },
        kv_cache_memory_bytes=BLOCK_BYTES * (1 + SLOTS * SLOT_BLOCKS + MAX_PINNED),
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(pinning_engine: Engine) -> Iterator[Engine]:
    yield pinning_engine
    for source in sources(pinning_engine)["data"]:
        call(pinning_engine, "remove", name=source["name"])
    pinning_engine.forget_prefixes()
    pinning_engine.check_all_free()


def call(engine: Engine, action: str, **values: Any) -> dict[str, Any]:
    answer: dict[str, Any] = engine.core.bounded_kv_sources(action, values)
    engine.check()
    return answer


def sources(engine: Engine, salt: str | None = None) -> dict[str, Any]:
    return call(engine, "list", cache_salt=salt)


def pin(
    engine: Engine,
    name: str,
    tokens: list[int],
    salt: str | None = None,
    ttl_s: float | None = None,
) -> dict[str, Any]:
    """Declare a source, and let a request compute it if that must be."""
    answer = call(engine, "add", name=name, token_ids=tokens, cache_salt=salt, ttl_s=ttl_s)
    assert "error" not in answer, answer
    if not answer["source"]["is_computed"]:
        ask(engine, tokens, salt)
    found: dict[str, Any] = call(engine, "find", name=name, cache_salt=salt)["source"]
    assert found["is_computed"]
    return found


def ask(
    engine: Engine, source: list[int], salt: str | None = None, max_tokens: int = 1
) -> tuple[Ask, Answer]:
    asked = Ask(
        [*source, *random_prompt(3, seed=9)],
        max_tokens,
        {"kv_source_len": len(source)},
        salt=salt,
    )
    (answer,) = engine.run([asked])
    return asked, answer


def evict_all_that_can_be(engine: Engine) -> None:
    """As many different streams at once as there are slots, twice: every free block is used."""
    for seed in (50, 60):
        engine.run(
            [
                Ask(random_prompt(200, seed=seed + i), 3, {"kv_sink": MAX_SOURCE})
                for i in range(SLOTS)
            ]
        )


def test_a_pin_survives_eviction_and_reset(engine: Engine, oracle: OracleLlama) -> None:
    shown = pin(engine, "voice", SOURCE)
    assert (shown["tokens"], shown["blocks"]) == (MAX_SOURCE, 3)
    evict_all_that_can_be(engine)
    assert engine.scheduler.reset_prefix_cache()
    asked, answer = ask(engine, SOURCE, max_tokens=2 * WINDOW)
    assert answer.num_cached == MAX_SOURCE
    expect_exact(oracle, asked, answer, MAX_SOURCE, WINDOW)


def test_control_without_a_pin_it_is_evicted(engine: Engine) -> None:
    ask(engine, SOURCE)
    evict_all_that_can_be(engine)
    assert ask(engine, SOURCE)[1].num_cached == 0


def test_a_reset_keeps_nothing_else(engine: Engine) -> None:
    pin(engine, "voice", SOURCE)
    other = random_prompt(64, seed=2)
    ask(engine, other)
    assert ask(engine, other)[1].num_cached == 64
    assert engine.scheduler.reset_prefix_cache()
    assert ask(engine, other)[1].num_cached == 0
    assert ask(engine, SOURCE)[1].num_cached == MAX_SOURCE


def test_new_weights_compute_a_pin_again(engine: Engine) -> None:
    """A reset that takes running streams' blocks says that what is cached is wrong."""
    pin(engine, "voice", SOURCE)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not call(engine, "find", name="voice")["source"]["is_computed"]
    engine.check_all_free()
    assert ask(engine, SOURCE)[1].num_cached == 0
    assert call(engine, "find", name="voice")["source"]["is_computed"]
    evict_all_that_can_be(engine)
    assert ask(engine, SOURCE)[1].num_cached == MAX_SOURCE


def test_a_reset_while_streams_run_changes_nothing(engine: Engine) -> None:
    pin(engine, "voice", SOURCE)
    engine.add(Ask([*SOURCE, 7], 5, {"kv_source_len": MAX_SOURCE}))
    engine.engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.check()
    engine.drain(poison=False)
    assert ask(engine, SOURCE)[1].num_cached == MAX_SOURCE


def test_a_prefix_that_is_cached_already_is_pinned_at_once(engine: Engine) -> None:
    ask(engine, SOURCE)
    answer = call(engine, "add", name="voice", token_ids=SOURCE)
    assert answer["source"]["is_computed"] and answer["is_new"]


def test_the_same_tokens_are_pinned_once(engine: Engine) -> None:
    first = pin(engine, "one", SOURCE)
    second = pin(engine, "two", SOURCE)
    longer = pin(engine, "start", SOURCE[:64])
    assert first["id"] == second["id"] != longer["id"]
    assert sources(engine)["pinned_blocks"] == 3
    call(engine, "remove", name="one")
    evict_all_that_can_be(engine)
    assert ask(engine, SOURCE)[1].num_cached == MAX_SOURCE
    call(engine, "remove", name="two")
    assert sources(engine)["pinned_blocks"] == 2
    evict_all_that_can_be(engine)
    assert ask(engine, SOURCE)[1].num_cached == 64


def test_two_tenants_share_nothing(engine: Engine) -> None:
    pin(engine, "voice", SOURCE, salt="red")
    assert sources(engine)["data"] == sources(engine, "blue")["data"] == []
    assert call(engine, "find", name="voice", cache_salt="blue")["error"]["status"] == 404
    assert call(engine, "remove", name="voice")["error"]["status"] == 404
    for salt, hit in ((None, 0), ("blue", 0), ("red", MAX_SOURCE)):
        assert ask(engine, SOURCE, salt)[1].num_cached == hit
    pin(engine, "voice", SOURCE, salt="blue")
    assert sources(engine)["pinned_blocks"] == 6
    for salt in ("red", "blue"):
        call(engine, "remove", name="voice", cache_salt=salt)


def test_over_quota(engine: Engine) -> None:
    for i in range(2):
        pin(engine, f"n{i}", random_prompt(96, seed=20 + i))
    error = call(engine, "add", name="n2", token_ids=random_prompt(96, seed=22))["error"]
    assert error["status"] == 409
    assert "needs 3 blocks of 32 tokens more, but 6 of 8 are pinned" in error["message"]
    assert len(sources(engine)["data"]) == 2
    pin(engine, "n2", random_prompt(64, seed=22))
    assert sources(engine)["pinned_blocks"] == MAX_PINNED


def test_every_slot_is_reachable_beside_a_full_quota(engine: Engine, oracle: OracleLlama) -> None:
    for i in range(4):
        pin(engine, f"n{i}", random_prompt(64, seed=20 + i))
    asks = [Ask(random_prompt(50, seed=i), 60, {"kv_sink": MAX_SOURCE}) for i in range(SLOTS + 1)]
    running = []
    answers = engine.run(
        asks,
        on_step=lambda _: running.append(len(engine.scheduler.running)),
    )
    assert max(running) == SLOTS
    for asked, answer in zip(asks, answers, strict=True):
        expect_exact(oracle, asked, answer, MAX_SOURCE, WINDOW)


def test_a_running_request_keeps_what_it_uses(engine: Engine, oracle: OracleLlama) -> None:
    pin(engine, "voice", SOURCE)
    asked = Ask([*SOURCE, 65], 3 * WINDOW, {"kv_source_len": MAX_SOURCE})

    def drop(step: int) -> None:
        if step == 3:
            call(engine, "remove", name="voice")

    (answer,) = engine.run([asked], on_step=drop)
    assert answer.num_cached == MAX_SOURCE
    expect_exact(oracle, asked, answer, MAX_SOURCE, WINDOW)
    engine.check_all_free()


def test_a_source_ends_with_its_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_bounded_kv.engine import sources as module

    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    pin(engine, "short", SOURCE, ttl_s=10)
    pin(engine, "long", random_prompt(64, seed=2), ttl_s=100)
    now[0] += 9.9
    assert len(sources(engine)["data"]) == 2
    pin(engine, "short", SOURCE, ttl_s=10)  # renewed
    now[0] += 9.9
    assert len(sources(engine)["data"]) == 2
    now[0] += 0.2
    assert engine.scheduler.bounded_kv_figures()["pinned_blocks"] == 2
    assert [s["name"] for s in sources(engine)["data"]] == ["long"]
    now[0] += 100
    engine.run([Ask(random_prompt(5), 2)])  # a step is enough
    assert engine.scheduler.sources.num_blocks == 0


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (MAX_SOURCE + 1, "the source has 97 tokens, more than this server's limit 96"),
        (BLOCK - 1, "the server keeps 31 of the source's 31 tokens, which fill no block of 32"),
    ],
)
def test_sources_that_are_refused(engine: Engine, tokens: int, message: str) -> None:
    error = call(engine, "add", name="voice", token_ids=random_prompt(tokens))["error"]
    assert error["status"] == 400
    assert message in error["message"]
    assert sources(engine)["data"] == []


def test_a_name_means_one_thing(engine: Engine) -> None:
    pin(engine, "voice", SOURCE)
    error = call(engine, "add", name="voice", token_ids=SOURCE[:64])["error"]
    assert error["status"] == 409
    assert "names another source of 96 tokens" in error["message"]


def test_who_declared_it_last_may_abandon_it(engine: Engine) -> None:
    """A computation that failed takes back its own source, not another's of that name."""
    for claim in ("first", "second"):
        call(engine, "add", name="voice", token_ids=SOURCE, claim=claim)
    call(engine, "abandon", name="voice", claim="first")
    assert len(sources(engine)["data"]) == 1
    call(engine, "abandon", name="voice", claim="second")
    assert sources(engine)["pinned_blocks"] == 0
    call(engine, "add", name="voice", token_ids=SOURCE, claim="third")
    ask(engine, SOURCE)
    call(engine, "abandon", name="voice", claim="third")
    assert len(sources(engine)["data"]) == 1, "what is computed stays"
    call(engine, "add", name="voice", token_ids=SOURCE, claim="fourth")
    call(engine, "abandon", name="voice", claim="fourth", even_computed=True)
    assert len(sources(engine)["data"]) == 1, "what was there before stays"
    call(engine, "abandon", name="voice", claim="third", even_computed=True)
    assert len(sources(engine)["data"]) == 1, "declared since"
    call(engine, "remove", name="voice")
    call(engine, "add", name="voice", token_ids=SOURCE, claim="fifth")
    call(engine, "abandon", name="voice", claim="fifth", even_computed=True)
    assert sources(engine)["pinned_blocks"] == 0
    call(engine, "abandon", name="voice", claim="fifth")


def test_an_abandoned_source_leaves_nothing(engine: Engine) -> None:
    """Declared, never computed, and let go."""
    call(engine, "add", name="voice", token_ids=SOURCE)
    assert sources(engine)["pinned_blocks"] == 3
    call(engine, "remove", name="voice")
    ask(engine, SOURCE)
    engine.check_all_free()
