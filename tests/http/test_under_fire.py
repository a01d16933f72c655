"""A server of text under fire: it answers those who behave, and holds nothing of those who do not.

`make torture` runs the same with other numbers (`support.fire`).
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.tiny_llama import random_prompt
from support.engine import Ask, expect_exact
from support.fire import Scale, leave_at_random, send_malformed, sip, slow_readers
from support.held import held, wait_until_back
from support.oracle_llama import OracleLlama
from support.server import ENDLESS, SERVED, complete, complete_all
from vllm_bounded_kv.launch import VllmServer

SINK, WINDOW = 5, 96
MAX_NUM_SEQS = 8
MAX_SOURCE = 96
CROWD = 4 * MAX_NUM_SEQS
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/bounded_kv/sources")


def body(i: int) -> dict[str, Any]:
    """A request for a stream that does not end of itself; every third does not stream."""
    source = {"kv_source_len": 1 + i % MAX_SOURCE} if i % 4 == 0 else {}
    return {
        "model": SERVED,
        "prompt": random_prompt(100, seed=i % 7),
        "max_tokens": ENDLESS,
        "ignore_eos": True,
        "stream": i % 3 != 0,
        "vllm_xargs": source,
    }


def test_four_times_as_many_clients_as_may_run(
    server: VllmServer, oracle: OracleLlama, scale: Scale
) -> None:
    rng = random.Random(1)

    def crowd(count: int) -> None:
        asks = [Ask(random_prompt(8 + i, seed=i), rng.choice([20, 60, 110])) for i in range(count)]
        for ask, answer in zip(asks, complete_all(server.url, asks), strict=True):
            expect_exact(oracle, ask, answer, SINK, WINDOW)

    crowd(CROWD)
    before = held(server)
    for _ in range(scale.rounds):
        crowd(CROWD)
    wait_until_back(server, before)


def test_streams_are_aborted_at_random_moments(
    server: VllmServer, oracle: OracleLlama, scale: Scale
) -> None:
    def leave(count: int) -> int:
        return leave_at_random(server.url, "/v1/completions", body, count, {})

    leave(scale.aborts // 4)
    complete(server.url, Ask([65], 3))
    before = held(server)
    assert leave(scale.aborts) > scale.aborts // 10, "none was on its way"
    wait_until_back(server, before)
    ask = Ask(random_prompt(50, seed=3), max_tokens=120)
    expect_exact(oracle, ask, complete(server.url, ask), SINK, WINDOW)


def test_slow_readers_keep_nobody_waiting(
    server: VllmServer, oracle: OracleLlama, scale: Scale
) -> None:
    """Fewer than there are slots, and one of them reads nothing at all."""
    before = held(server)
    count = min(scale.slow_readers, 3)
    with slow_readers(server.url, "/v1/completions", body(1), count, {}) as readers:
        sip(readers, scale.slow_s)
        ask = Ask(random_prompt(50, seed=4), max_tokens=120)
        expect_exact(oracle, ask, complete(server.url, ask), SINK, WINDOW)
    wait_until_back(server, before)


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_malformed_is_refused(server: VllmServer, scale: Scale, route: str) -> None:
    send_malformed(server, route, {}, scale)
    before = held(server)
    send_malformed(server, route, {}, scale)
    wait_until_back(server, before)
