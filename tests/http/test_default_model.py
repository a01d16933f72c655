"""SmolLM2 through HTTP: where the window covers the whole answer, the text is stock vLLM's.

Both servers use the same block size and get the same 20 chats. Stock vLLM is the oracle, under the
project's rule: a token is right when it is the oracle's choice, or the oracle's top two lie within
`NEAR_TIE`; the comparison then goes on from the bounded server's token.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.oracle_llama import NEAR_TIE
from support.server import Metrics, figures, metrics, openai_client, serving
from vllm_bounded_kv.default_model import ensure_default_model

NAME = "smollm2"
MAX_TOKENS = 48
SINK, WINDOW = 4, 252
CLIENTS = 10
ENV = {"OMP_NUM_THREADS": "2"}
FLAGS = [
    *("--served-model-name", NAME, "--dtype", "float32", "--enforce-eager"),
    *("--block-size", "32", "--max-model-len", "512", "--max-num-seqs", str(CLIENTS)),
    *("--kv-cache-memory-bytes", str(128 << 20)),
]
BOUNDED_FLAGS = [
    *("--kv-plugin", "bounded", "--bounded-kv-positions", "absolute"),
    *("--bounded-kv-sink", str(SINK), "--bounded-kv-window", str(WINDOW)),
]

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain why the sky is blue to a child.",
    "List five fruits.",
    "Translate 'good morning' into Spanish.",
    "What is 17 times 3? Show your steps.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Describe the water cycle in two sentences.",
    "Write a Python function that adds two numbers.",
    "What are the primary colours?",
    "Tell me a short story about a fox.",
    "How do magnets work?",
    "Name three rivers in Europe and the countries that they flow through.",
    "What should I pack for a week at the beach?",
    "Summarise the plot of Cinderella.",
    "Why do we have seasons?",
    "Write a polite e-mail that declines an invitation to dinner on Friday.",
    "What is the difference between a list and a tuple in Python?",
    "Continue the sequence and say how you know: 2, 4, 8, 16, 32.",
]
assert len(set(QUESTIONS)) == 20


@dataclass(frozen=True)
class Said:
    """One greedy answer, and what came second at each of its tokens."""

    prompt: list[int]
    tokens: list[int]
    text: str
    finish_reason: str
    seconds: list[tuple[int, float]]
    """The second best token, and how far it lies below the best in log-probability."""


def second_best(top: dict[str, float]) -> tuple[int, float]:
    """Of the two best tokens, written `token_id:<id>`, with their log-probabilities."""
    (_, best), (token, second) = sorted(top.items(), key=lambda item: -item[1])
    return int(token.removeprefix("token_id:")), best - second


EXTRA = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def say(url: str, question: str, **args: Any) -> Said:
    """A greedy chat answer."""
    response = openai_client(url).chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={**EXTRA, **args},
    )
    (choice,) = response.choices
    tops = [{t.token: t.logprob for t in told.top_logprobs} for told in choice.logprobs.content]
    return Said(
        prompt=response.prompt_token_ids,
        tokens=choice.token_ids,
        text=choice.message.content,
        finish_reason=choice.finish_reason,
        seconds=[second_best(top) for top in tops],
    )


def say_all(url: str) -> list[Said]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda question: say(url, question), QUESTIONS))


def go_on(url: str, prompt: list[int], num_tokens: int) -> Said:
    """What follows these tokens, greedily."""
    response = openai_client(url).completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=num_tokens,
        temperature=0,
        logprobs=2,
        extra_body=EXTRA,
    )
    (choice,) = response.choices
    return Said(
        prompt,
        choice.token_ids,
        choice.text,
        choice.finish_reason,
        [second_best(top) for top in choice.logprobs.top_logprobs],
    )


@dataclass(frozen=True)
class Bounded:
    """What the bounded server said and showed."""

    answers: list[Said]
    figures: dict[str, Any]
    narrow: list[Said]
    """The same questions through a window of 8."""


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="module")
def bounded(model: Path) -> Bounded:
    """The bounded server's side; the server has ended by the time stock vLLM starts."""
    with serving(model, [*FLAGS, *BOUNDED_FLAGS], ENV) as server:
        answers = say_all(server.url)
        shown = figures(server.url)
        args = {"vllm_xargs": {"kv_window": 8}}
        narrow = [say(server.url, question, **args) for question in QUESTIONS[:2]]
    return Bounded(answers, shown, narrow)


@pytest.fixture(scope="module")
def stock_url(bounded: Bounded, model: Path) -> Iterator[str]:
    """Stock vLLM: the package is installed, the flag is not given."""
    with serving(model, FLAGS, ENV) as server:
        yield server.url


@pytest.fixture(scope="module")
def stock(stock_url: str) -> list[Said]:
    return say_all(stock_url)


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    pairs = zip([*ours, None], [*theirs, None], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def expect_same(stock_url: str, ours: Said, theirs: Said) -> None:
    """`ours` is what `theirs` says, up to near ties."""
    assert ours.prompt == theirs.prompt
    start, said = 0, theirs
    while (at := first_difference(ours.tokens[start:], said.tokens)) is not None:
        where = f"{ours.text!r} differs from {theirs.text!r} at token {start + at}"
        assert at < min(len(said.tokens), len(ours.tokens) - start), where
        second, gap = said.seconds[at]
        assert gap <= NEAR_TIE and ours.tokens[start + at] == second, f"{where}: gap {gap}"
        start += at + 1
        said = go_on(stock_url, [*ours.prompt, *ours.tokens[:start]], MAX_TOKENS - start)
    if start == 0:
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)


@pytest.mark.parametrize("index", range(len(QUESTIONS)))
def test_the_same_text_as_stock(
    stock_url: str, stock: list[Said], bounded: Bounded, index: int
) -> None:
    expect_same(stock_url, bounded.answers[index], stock[index])


def test_the_window_covered_every_answer(bounded: Bounded) -> None:
    shown = bounded.figures
    assert shown["ring_wraps"] == 0
    assert shown["policy"]["window"] == WINDOW
    assert max(len(a.prompt) + len(a.tokens) for a in bounded.answers) <= SINK + WINDOW
    assert sum(len(a.tokens) for a in bounded.answers) > 10 * MAX_TOKENS


def test_control_a_narrow_window_says_something_else(
    stock_url: str, stock: list[Said], bounded: Bounded
) -> None:
    for ours, theirs in zip(bounded.narrow, stock, strict=False):
        with pytest.raises(AssertionError, match="differs"):
            expect_same(stock_url, ours, theirs)


# --- and without the flag, nothing of the plugin shows


def test_stock_has_no_figures(stock_url: str) -> None:
    assert httpx.get(f"{stock_url}/v1/bounded_kv", timeout=60).status_code == 404


def test_stock_has_no_metrics_of_ours(stock_url: str) -> None:
    scraped: Metrics = metrics(stock_url)
    assert scraped.names("bounded_kv") == set()
    assert scraped.names("vllm:")


def test_stock_leaves_our_arguments_alone(stock_url: str, stock: list[Said]) -> None:
    args = {"vllm_xargs": {"kv_window": "no number"}}
    assert say(stock_url, QUESTIONS[0], **args).text == stock[0].text
