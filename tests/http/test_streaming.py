"""Streams over HTTP with the stock `openai` client: exact, bounded, and gone when the client is."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import httpx
import pytest
from openai import APITimeoutError

from benchmarks.tiny_llama import random_prompt
from support.engine import LOGPROB_TOL, Ask, expect_exact, judge
from support.oracle_llama import OracleLlama, assert_exact, bounded_mask
from support.server import (
    ENDLESS,
    SERVED,
    TIMEOUT_S,
    complete,
    complete_all,
    completion_stream,
    figures,
    in_background,
    metrics,
    openai_client,
    running_stream,
    wait_until,
    wait_until_idle,
)

SINK, WINDOW, SLOTS = 5, 96, 4
HEALTH_SHARE = 0.5
"""Longest share of the engine's work that `/health` may take: all of it, if it waited for that."""


def test_one_stream_past_five_wraps(url: str, oracle: OracleLlama) -> None:
    wraps = figures(url)["ring_wraps"]
    ask = Ask(random_prompt(20, seed=1), max_tokens=6 * WINDOW)
    arrived: list[int] = []
    answer = complete(url, ask, on_chunk=arrived.append)
    expect_exact(oracle, ask, answer, SINK, WINDOW)
    # A starved API server may find several tokens at once, but never hundreds.
    assert len(set(arrived)) > ask.max_tokens // 4, "the tokens came in lumps"
    assert figures(url)["ring_wraps"] - wraps >= 5


def test_eight_policies_at_once(url: str, oracle: OracleLlama) -> None:
    policies = [(5, 96), (0, 33), (40, 64), (96, 96), (1, 1), (32, 32), (7, 50), (64, 17)]
    asks = [
        Ask(
            random_prompt(11 + 37 * i, seed=i),
            max_tokens=5 * window + 30,
            args={"kv_sink": sink, "kv_window": window},
        )
        for i, (sink, window) in enumerate(policies)
    ]
    answers = complete_all(url, asks)
    for ask, answer, (sink, window) in zip(asks, answers, policies, strict=True):
        expect_exact(oracle, ask, answer, sink, window)


@pytest.mark.parametrize(("sink", "window"), [(SINK - 1, WINDOW), (SINK, WINDOW + 1)])
def test_control_another_mask_is_noticed(
    url: str, oracle: OracleLlama, sink: int, window: int
) -> None:
    ask = Ask(random_prompt(20, seed=1), max_tokens=2 * WINDOW)
    answer = complete(url, ask)
    assert not judge(oracle, ask, answer, sink, window).exact


def chat_stream(url: str, content: str, max_tokens: int, **args: Any) -> Any:
    return openai_client(url).chat.completions.create(
        model=SERVED,
        messages=[{"role": "user", "content": content}],
        max_tokens=max_tokens,
        temperature=0,
        logprobs=True,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True, "vllm_xargs": args},
    )


def test_chat(url: str, oracle: OracleLlama) -> None:
    """A declared source is the whole of the sink, in chat as well."""
    prompt: list[int] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    with closing(
        chat_stream(url, "Keep this. " * 9, 250, kv_source_len=90, kv_window=40)
    ) as chunks:
        for chunk in chunks:
            prompt += getattr(chunk, "prompt_token_ids", None) or []
            for choice in chunk.choices:
                tokens += getattr(choice, "token_ids", None) or []
                logprobs += [
                    t.logprob for t in (choice.logprobs.content if choice.logprobs else [])
                ]
    assert len(prompt) > 90
    assert len(tokens) == 250
    assert_exact(
        oracle,
        prompt,
        tokens,
        lambda n: bounded_mask(n, 90, 40),
        logprobs=logprobs,
        logprob_tol=LOGPROB_TOL,
    )


def test_two_answers_to_one_prompt(url: str) -> None:
    """`n=2`: two streams of their own, in one response."""
    seen: dict[int, str] = {0: "", 1: ""}
    stream = openai_client(url).completions.create(
        model=SERVED,
        prompt=random_prompt(120, seed=2),
        max_tokens=150,
        n=2,
        temperature=1.0,
        seed=7,
        stream=True,
        extra_body={"ignore_eos": True, "vllm_xargs": {"kv_sink": 8, "kv_window": 30}},
    )
    for chunk in stream:
        for choice in chunk.choices:
            seen[choice.index] += choice.text
    assert [len(text) for text in seen.values()] == [150, 150]
    assert seen[0] != seen[1]


def test_more_clients_than_slots(url: str, oracle: OracleLlama) -> None:
    """The rest wait for a slot of their own; all finish, and nobody is preempted."""
    preempted = metrics(url)("vllm:num_preemptions_total")
    asks = [Ask(random_prompt(30 + i, seed=i), max_tokens=300) for i in range(3 * SLOTS)]
    with in_background(lambda: complete_all(url, asks)) as answers:
        wait_until(lambda: figures(url)["slots_used"], lambda n: n == SLOTS)
        wait_until(lambda: metrics(url)("vllm:num_requests_waiting"), lambda n: n > 0)
        while not answers.done():
            assert figures(url)["slots_used"] <= SLOTS
    for ask, answer in zip(asks, answers.result(), strict=True):
        expect_exact(oracle, ask, answer, SINK, WINDOW)
    assert metrics(url)("vllm:num_preemptions_total") == preempted


# --- clients that go away


def test_leaving_a_stream_frees_its_slot(url: str) -> None:
    wraps = figures(url)["ring_wraps"]
    with running_stream(url, Ask(random_prompt(40), ENDLESS)):
        shown = wait_until(lambda: figures(url), lambda f: f["slots_used"] == 1)
        assert shown["pool_blocks_free"] == shown["pool_blocks"] - 4
    wraps = wait_until_idle(url)["ring_wraps"] - wraps
    assert wraps < ENDLESS // WINDOW, "the stream ran to its end"


def test_leaving_a_request_that_does_not_stream_frees_its_slot(url: str) -> None:
    client = openai_client(url).with_options(timeout=0.5)
    with pytest.raises(APITimeoutError):
        client.completions.create(
            model=SERVED,
            prompt=random_prompt(40),
            max_tokens=ENDLESS,
            extra_body={"ignore_eos": True},
        )
    wait_until_idle(url)


def test_leaving_the_queue(url: str) -> None:
    """A client that goes away before it had a slot never takes one."""
    with ThreadPoolExecutor(SLOTS) as pool:
        streams = list(
            pool.map(
                lambda seed: completion_stream(url, Ask(random_prompt(40, seed=seed), ENDLESS)),
                range(SLOTS),
            )
        )
    wait_until(lambda: figures(url), lambda f: f["slots_used"] == SLOTS)
    with suppress(httpx.ReadTimeout, APITimeoutError):
        openai_client(url).with_options(timeout=0.5).completions.create(
            model=SERVED, prompt=random_prompt(9), max_tokens=5
        )
    wait_until(lambda: metrics(url)("vllm:num_requests_waiting"), lambda n: n == 0)
    assert figures(url)["slots_used"] == SLOTS
    for stream in streams:
        stream.close()
    wait_until_idle(url)


def test_forty_cancelled_requests_leave_nothing(url: str, oracle: OracleLlama) -> None:
    def cancelled(seed: int) -> None:
        with running_stream(url, Ask(random_prompt(60, seed=seed), ENDLESS)):
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cancelled, range(40)))
    wait_until_idle(url)
    ask = Ask(random_prompt(50, seed=3), max_tokens=120)
    expect_exact(oracle, ask, complete(url, ask), SINK, WINDOW)


def test_health_answers_while_long_prompts_are_read(url: str) -> None:
    asks = [Ask(random_prompt(8000, seed=seed), max_tokens=1) for seed in range(8 * SLOTS)]
    times = []
    start = time.perf_counter()
    with in_background(lambda: complete_all(url, asks)) as answers:
        wait_until(lambda: figures(url)["slots_used"], lambda n: n > 0)
        while not answers.done():
            asked = time.perf_counter()
            assert httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200
            times.append(time.perf_counter() - asked)
            time.sleep(0.01)
    seconds = time.perf_counter() - start
    assert len(answers.result()) == len(asks)
    assert times, "the prompts were read before anything could be asked"
    assert max(times) < HEALTH_SHARE * seconds
