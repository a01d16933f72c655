"""A chat whose history outgrows what the model was trained on, all of it sent with every turn.

Nothing happens below `--max-model-len`; above it, there is a clear error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from benchmarks.tiny_llama import TinyLlama
from support.endless import LIMIT, MAX_LEN, SINK, WINDOW
from support.engine import Answer, Ask, expect_exact
from support.oracle_llama import OracleLlama
from support.server import SERVED, openai_client, wait_until_idle
from vllm_bounded_kv.launch import VllmServer

TURNS, ANSWER_TOKENS = 40, 12
TRAINED = TinyLlama().max_position_embeddings
JUDGED = {0, 3, 11}
"""Turns that the oracle, which keeps everything, is asked about: the last is far beyond where
positions fall back."""


@pytest.fixture
def url(endless_server: VllmServer) -> Iterator[str]:
    yield endless_server.url
    wait_until_idle(endless_server.url)


def say(url: str, messages: list[Any]) -> Any:
    return openai_client(url).chat.completions.create(
        model=SERVED,
        messages=messages,
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        logprobs=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )


def test_forty_turns(url: str, oracle: OracleLlama) -> None:
    messages: list[Any] = []
    lengths = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"This is turn {turn}. " + "Go on. " * 40})
        answer = say(url, messages)
        choice = answer.choices[0]
        assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == ANSWER_TOKENS
        lengths.append(answer.usage.prompt_tokens)
        if turn in JUDGED:
            logprobs = [token.logprob for token in choice.logprobs.content]
            expect_exact(
                oracle,
                Ask(answer.prompt_token_ids, ANSWER_TOKENS),
                Answer(choice.token_ids, logprobs, 0),
                SINK,
                WINDOW,
                limit=LIMIT,
            )
        messages.append({"role": "assistant", "content": f"Answer {turn}."})
    assert lengths == sorted(lengths)
    assert lengths[0] > SINK + WINDOW and lengths[max(JUDGED)] > 3 * LIMIT
    assert lengths[-1] > 1.3 * TRAINED


def test_beyond_the_servers_length(url: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {MAX_LEN}"):
        say(url, [{"role": "user", "content": "x" * (MAX_LEN + 1)}])
