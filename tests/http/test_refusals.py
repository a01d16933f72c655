"""What a request may not ask for: HTTP 400 in OpenAI's envelope, before anything is streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from benchmarks.tiny_llama import random_prompt
from support.engine import Ask, expect_exact
from support.oracle_llama import OracleLlama
from support.server import SERVED, complete, metrics, openai_client

PROMPT = random_prompt(30)
WINDOW = MAX_SOURCE = MAX_SINK = 96

TOO_LARGE = [
    ("kv_window", WINDOW + 1, WINDOW),
    ("kv_sink", MAX_SINK + 1, MAX_SINK),
    ("kv_source_len", MAX_SOURCE + 1, MAX_SOURCE),
    ("kv_window", 2**62, WINDOW),
]
TOO_SMALL = [("kv_window", 0, 1), ("kv_sink", -1, 0), ("kv_source_len", -7, 0)]
WRONG_TYPES = [
    ("kv_window", "12"),
    ("kv_window", ""),
    ("kv_window", True),  # which vLLM's own schema would turn into 1
    ("kv_sink", 1.5),
    ("kv_sink", 4.0),
    ("kv_source_len", [1]),
    ("kv_source_len", []),
]

Send = Callable[..., Any]


def send_completion(url: str, args: dict[str, Any], stream: bool) -> Any:
    return openai_client(url).completions.create(
        model=SERVED,
        prompt=PROMPT,
        max_tokens=5,
        stream=stream,
        extra_body={"vllm_xargs": args},
    )


def send_chat(url: str, args: dict[str, Any], stream: bool) -> Any:
    return openai_client(url).chat.completions.create(
        model=SERVED,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        stream=stream,
        extra_body={"vllm_xargs": args},
    )


@pytest.fixture(params=[send_completion, send_chat], ids=["completion", "chat"])
def send(request: pytest.FixtureRequest) -> Send:
    sender: Send = request.param
    return sender


def refusal(send: Send, url: str, args: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The error's body; the client raises before it has a stream to read."""
    with pytest.raises(openai.BadRequestError) as caught:
        send(url, args, stream)
    assert caught.value.status_code == 400
    assert caught.value.response.headers["content-type"].startswith("application/json")
    error: Any = caught.value.body
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    return dict(error)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("field", "value", "limit"), TOO_LARGE)
def test_beyond_the_limit(
    url: str, send: Send, stream: bool, field: str, value: int, limit: int
) -> None:
    error = refusal(send, url, {field: value}, stream)
    assert error["param"] == field
    assert f"{field}={value}: is beyond this server's limit {limit}" in error["message"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("field", "value", "limit"), TOO_SMALL)
def test_below_the_limit(
    url: str, send: Send, stream: bool, field: str, value: int, limit: int
) -> None:
    error = refusal(send, url, {field: value}, stream)
    assert error["param"] == field
    assert f"{field}={value}: must be >= {limit}" in error["message"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("field", "value"), WRONG_TYPES)
def test_wrong_types(url: str, send: Send, stream: bool, field: str, value: Any) -> None:
    error = refusal(send, url, {field: value}, stream)
    assert error["param"] == field
    kind = type(value).__name__
    assert f"{field}={value!r}: must be an integer, got {kind}" in error["message"]


@pytest.mark.parametrize("value", [None, {"a": 1}, [[1]]])
def test_what_vllms_own_schema_refuses(url: str, send: Send, value: Any) -> None:
    """Never reaches the plugin; a 400 that names the field all the same."""
    with pytest.raises(openai.BadRequestError, match=r"body\.vllm_xargs\.kv_window"):
        send(url, {"kv_window": value}, True)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_source_longer_than_the_prompt(url: str, stream: bool) -> None:
    args = {"kv_source_len": len(PROMPT) + 1}
    error = refusal(send_completion, url, args, stream)
    assert error["param"] == "kv_source_len"
    assert f"which has {len(PROMPT)} tokens" in error["message"]
    send_completion(url, {"kv_source_len": len(PROMPT)}, False)  # the whole prompt is allowed


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_source_longer_than_the_chat(url: str, stream: bool) -> None:
    """The rendered chat counts, template and all."""
    error = refusal(send_chat, url, {"kv_source_len": 60}, stream)
    assert error["param"] == "kv_source_len"
    assert "is longer than the prompt, which has " in error["message"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_an_unknown_argument(url: str, send: Send, stream: bool) -> None:
    error = refusal(send, url, {"kv_windows": 5}, stream)
    assert error["param"] == "kv_windows"
    assert "known: kv_source_len, kv_sink, kv_window" in error["message"]


def test_arguments_of_others_are_left_alone(url: str, send: Send) -> None:
    send(url, {"voice": "x", "speed": 1.5, "kv_window": WINDOW, "kv_sink": 0}, False)


def test_one_bad_prompt_of_two_refuses_both(url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="which has 3 tokens"):
        openai_client(url).completions.create(
            model=SERVED,
            prompt=[random_prompt(20), random_prompt(3)],
            max_tokens=5,
            stream=True,
            extra_body={"vllm_xargs": {"kv_source_len": 10}},
        )


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_other_routes_that_generate(url: str, stream: bool) -> None:
    body = {
        "model": SERVED,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 5,
        "stream": stream,
        "vllm_xargs": {"kv_window": WINDOW + 1},
    }
    response = httpx.post(f"{url}/v1/messages", json=body, timeout=60)
    assert response.status_code == 400
    assert f"kv_window={WINDOW + 1}" in response.json()["error"]["message"]
    if not stream:
        body["messages"] = [body["messages"]]
        response = httpx.post(f"{url}/v1/chat/completions/batch", json=body, timeout=60)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "kv_window"


def test_every_refusal_is_counted_once_by_its_reason(url: str, send: Send) -> None:
    before = metrics(url).refusals()
    assert set(before) == {
        "kv_window",
        "kv_sink",
        "kv_source_len",
        "kv_source",
        "unknown_argument",
    }
    for stream in (True, False):
        refusal(send, url, {"kv_window": 0}, stream)
        refusal(send, url, {"kv_sink": 97}, stream)
        refusal(send, url, {"kv_sink": "1"}, stream)
        refusal(send, url, {"kv_source_len": 97}, stream)
        refusal(send, url, {"kv_other": 1}, stream)
    send(url, {"kv_window": 5}, False)
    after = metrics(url).refusals()
    moved = {reason: after[reason] - before[reason] for reason in before}
    assert moved == {
        "kv_window": 2,
        "kv_sink": 4,
        "kv_source_len": 2,
        "kv_source": 0,
        "unknown_argument": 2,
    }


def test_the_server_works_afterwards(url: str, oracle: OracleLlama) -> None:
    ask = Ask(PROMPT, max_tokens=150, args={"kv_sink": 3, "kv_window": 50})
    for _ in range(3):
        refusal(send_completion, url, {"kv_window": 97}, True)
        expect_exact(oracle, ask, complete(url, ask), 3, 50)
