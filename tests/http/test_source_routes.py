"""`/v1/bounded_kv/sources` and `kv_source`: pinned over HTTP, named by requests, let go again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from benchmarks.tiny_llama import random_prompt
from support.endless import LIMIT, MAX_LEN, MAX_PINNED, MAX_SOURCE, SLOTS, WINDOW
from support.engine import Answer, Ask, expect_exact
from support.oracle_llama import OracleLlama
from support.server import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    SERVED,
    TIMEOUT_S,
    complete,
    figures,
    in_background,
    metrics,
    openai_client,
    running_stream,
    wait_until,
    wait_until_idle,
)
from vllm_bounded_kv.launch import VllmServer

NUM_SOURCES, SOURCE_LEN = 64, 70
SOURCE_BLOCKS = SOURCE_LEN // BLOCK_SIZE
LONG = 800
"""Tokens of an answer after which positions have fallen back."""
assert NUM_SOURCES * SOURCE_BLOCKS == MAX_PINNED
SOURCES = "/v1/bounded_kv/sources"


@pytest.fixture
def url(endless_server: VllmServer) -> Iterator[str]:
    """The server, with no source afterwards and every block back."""
    url = endless_server.url
    yield url
    for salt in (None, "red", "blue"):
        for source in listed(url, salt)["data"]:
            assert delete(url, source["name"], salt).status_code == 200
    shown = wait_until_idle(url)
    assert shown["sources"] == shown["pinned_blocks"] == 0


def salt_header(salt: str | None) -> dict[str, str]:
    return {} if salt is None else {"X-Cache-Salt": salt}


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{SOURCES}", json=body, timeout=TIMEOUT_S)


def pin(url: str, name: str, tokens: list[int], **body: Any) -> dict[str, Any]:
    response = post(url, name=name, prompt_token_ids=tokens, **body)
    assert response.status_code == 201, response.text
    shown: dict[str, Any] = response.json()
    return shown


def listed(url: str, salt: str | None = None) -> dict[str, Any]:
    response = httpx.get(f"{url}{SOURCES}", headers=salt_header(salt), timeout=TIMEOUT_S)
    shown: dict[str, Any] = response.raise_for_status().json()
    return shown


def delete(url: str, name: str, salt: str | None = None) -> httpx.Response:
    return httpx.delete(f"{url}{SOURCES}/{name}", headers=salt_header(salt), timeout=TIMEOUT_S)


def source_of(seed: int) -> list[int]:
    return random_prompt(SOURCE_LEN, seed=1000 + seed)


def expect_error(response: httpx.Response, status: int, param: str, message: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (status, param)
    assert message in error["message"]


def test_what_a_pin_shows(url: str) -> None:
    shown = pin(url, "voice", source_of(0), ttl_s=600)
    assert 590 < shown.pop("expires_in_s") <= 600
    assert shown.pop("id").startswith("src_")
    assert shown == {
        "name": "voice",
        "tokens": SOURCE_LEN,
        "blocks": SOURCE_BLOCKS,
        "bytes": SOURCE_BLOCKS * BLOCK_BYTES,
        "is_computed": True,
    }
    answer = listed(url)
    assert [s["name"] for s in answer["data"]] == ["voice"]
    assert (answer["pinned_blocks"], answer["max_pinned_blocks"]) == (SOURCE_BLOCKS, MAX_PINNED)
    assert figures(url)["pinned_blocks"] == metrics(url)("bounded_kv_pinned_blocks") == 2
    assert metrics(url)("bounded_kv_sources") == 1
    assert metrics(url)("bounded_kv_max_pinned_blocks") == MAX_PINNED
    one = httpx.get(f"{url}{SOURCES}/voice", timeout=TIMEOUT_S).json()
    assert one["tokens"] == SOURCE_LEN
    again = post(url, name="voice", prompt_token_ids=source_of(0))
    assert again.status_code == 200 and again.json()["expires_in_s"] is None
    assert delete(url, "voice").json()["deleted"] is True
    assert listed(url)["data"] == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_names_its_source(url: str, oracle: OracleLlama, stream: bool) -> None:
    """Exact as if it had sent the tokens; the source is the whole of its sink."""
    source, prompt = source_of(1), random_prompt(9, seed=2)
    pin(url, "voice", source)
    wait_until_idle(url)
    if stream:
        named = Ask(prompt, LONG, {"kv_source": "voice"})
        answer = complete(url, named, prompt_tokens=SOURCE_LEN + len(prompt))
        assert answer.num_cached == SOURCE_BLOCKS * BLOCK_SIZE
        tokens, logprobs = answer.tokens, answer.logprobs
    else:
        done = openai_client(url).completions.create(
            model=SERVED,
            prompt=prompt,
            max_tokens=LONG,
            temperature=0,
            logprobs=0,
            extra_body={
                "ignore_eos": True,
                "return_token_ids": True,
                "vllm_xargs": {"kv_source": "voice"},
            },
        )
        choice: Any = done.choices[0]
        tokens, logprobs = choice.token_ids, choice.logprobs.token_logprobs
        assert choice.prompt_token_ids == [*source, *prompt]
    asked = Ask([*source, *prompt], len(tokens))
    answer = Answer(tokens, logprobs, 0)
    expect_exact(oracle, asked, answer, SOURCE_LEN, WINDOW, limit=LIMIT)


def test_a_request_just_sends_the_same_tokens(url: str, oracle: OracleLlama) -> None:
    pin(url, "voice", source_of(1))
    ask = Ask([*source_of(1), 65, 66], 50, {"kv_source_len": SOURCE_LEN})
    answer = complete(url, ask)
    assert answer.num_cached == SOURCE_BLOCKS * BLOCK_SIZE
    expect_exact(oracle, ask, answer, SOURCE_LEN, WINDOW, limit=LIMIT)


def test_chat(url: str) -> None:
    """Pinned as messages, hit by the chat that begins with them, or named by one that does not."""
    system = [{"role": "system", "content": "Keep this. " * 5}]
    response = post(url, name="system", messages=system)
    assert response.status_code == 201, response.text
    source_len, blocks = response.json()["tokens"], response.json()["blocks"]

    def chat(messages: list[dict[str, str]], **args: Any) -> Any:
        return openai_client(url).chat.completions.create(
            model=SERVED,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=5,
            extra_body={"vllm_xargs": args},
        )

    user = {"role": "user", "content": "Hello"}
    both = chat([*system, user], kv_source_len=source_len).usage
    assert both.prompt_tokens_details.cached_tokens == blocks * BLOCK_SIZE
    alone = chat([user]).usage
    named = chat([user], kv_source="system").usage
    assert named.prompt_tokens_details.cached_tokens == blocks * BLOCK_SIZE
    assert named.prompt_tokens == source_len + alone.prompt_tokens


def test_text(url: str) -> None:
    response = post(url, name="text", prompt="x" * 64)
    assert (response.status_code, response.json()["tokens"]) == (201, 64)


def test_64_sources_and_200_requests_with_churn(url: str) -> None:
    """Every request hits, while other requests use up all that is not pinned, whatever is pinned
    and let go beside them."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: pin(url, f"voice-{i}", source_of(i)), range(NUM_SOURCES)))
    assert listed(url)["pinned_blocks"] == MAX_PINNED
    expect_error(
        post(url, name="one-more", prompt_token_ids=source_of(NUM_SOURCES)),
        409,
        "name",
        f"needs 2 blocks of 32 tokens more, but {MAX_PINNED} of {MAX_PINNED} are pinned",
    )
    before = metrics(url)
    choose = random.Random(0)
    kinds = choose.choices(["named", "sent", "churn"], weights=[2, 2, 1], k=200)
    kinds[:2] = ["named", "sent"]

    def one(number: int) -> tuple[str, Answer]:
        kind = kinds[number]
        if kind == "churn":
            ask = Ask(random_prompt(150, seed=number), 3, {"kv_sink": MAX_SOURCE})
            return kind, complete(url, ask)
        tail, source = random_prompt(1 + number % 20, seed=number), number % (NUM_SOURCES - 4)
        if kind == "named":
            ask = Ask(tail, 10, {"kv_source": f"voice-{source}"})
            return kind, complete(url, ask, prompt_tokens=SOURCE_LEN + len(tail))
        ask = Ask([*source_of(source), *tail], 10, {"kv_source_len": SOURCE_LEN})
        return kind, complete(url, ask)

    def repin(seed: int) -> None:
        delete(url, f"voice-{NUM_SOURCES - 1 - seed % 4}")
        pin(url, f"voice-{NUM_SOURCES - 1 - seed % 4}", source_of(500 + seed))

    with ThreadPoolExecutor(8) as pool, in_background(lambda: [repin(i) for i in range(8)]) as all_:
        answers = list(pool.map(one, range(200)))
        all_.result()
    hits = [a.num_cached for kind, a in answers if kind != "churn"]
    assert set(hits) == {SOURCE_BLOCKS * BLOCK_SIZE}
    moved = metrics(url)("vllm:prefix_cache_hits_total") - before("vllm:prefix_cache_hits_total")
    assert moved >= sum(hits)
    assert listed(url)["pinned_blocks"] == MAX_PINNED
    # Beside a full quota, every slot of the largest size can still be had.
    with ExitStack() as streams:
        for seed in range(SLOTS):
            ask = Ask(random_prompt(10, seed=seed), MAX_LEN - 20, {"kv_sink": MAX_SOURCE})
            streams.enter_context(running_stream(url, ask))
        wait_until(lambda: figures(url)["slots_used"], lambda n: n == SLOTS)


def test_two_tenants(url: str) -> None:
    """Neither sees, hits or deletes what the other has."""
    for salt in ("red", "blue"):
        pin(url, "voice", source_of(900), cache_salt=salt)
    assert listed(url)["data"] == []
    assert listed(url, "red")["pinned_blocks"] == 2 * SOURCE_BLOCKS
    assert delete(url, "voice").status_code == 404
    ids = {listed(url, salt)["data"][0]["id"] for salt in ("red", "blue")}
    assert len(ids) == 2

    def cached(salt: str | None) -> int:
        prompt = [*source_of(900), 65]
        args = {"kv_source_len": SOURCE_LEN}
        done = openai_client(url).completions.create(
            model=SERVED,
            prompt=prompt,
            max_tokens=1,
            extra_body={"vllm_xargs": args, **({"cache_salt": salt} if salt else {})},
        )
        details = done.usage.prompt_tokens_details if done.usage else None
        return (details and details.cached_tokens) or 0

    assert cached(None) == cached("green") == 0
    assert cached("red") == cached("blue") == SOURCE_BLOCKS * BLOCK_SIZE
    assert delete(url, "voice", "red").status_code == 200
    assert [s["name"] for s in listed(url, "blue")["data"]] == ["voice"]
    with pytest.raises(openai.NotFoundError, match="no such source here"):
        openai_client(url).completions.create(
            model=SERVED,
            prompt="x",
            max_tokens=1,
            extra_body={"vllm_xargs": {"kv_source": "voice"}, "cache_salt": "red"},
        )


def test_deleted_while_in_use(url: str, oracle: OracleLlama) -> None:
    pin(url, "voice", source_of(4))
    ask = Ask([*source_of(4), 70], LONG, {"kv_source_len": SOURCE_LEN})
    deleted: list[httpx.Response] = []

    def drop(_: int) -> None:
        if not deleted:
            deleted.append(delete(url, "voice"))
            complete(url, Ask(random_prompt(150), 3, {"kv_sink": MAX_SOURCE}))

    answer = complete(url, ask, on_chunk=drop)
    assert deleted[0].status_code == 200
    expect_exact(oracle, ask, answer, SOURCE_LEN, WINDOW, limit=LIMIT)


def test_a_reset_of_the_prefix_cache(url: str) -> None:
    pin(url, "voice", source_of(5))
    wait_until_idle(url)
    assert httpx.post(f"{url}/reset_prefix_cache", timeout=TIMEOUT_S).status_code == 200
    answer = complete(url, Ask([65], 3, {"kv_source": "voice"}), prompt_tokens=SOURCE_LEN + 1)
    assert answer.num_cached == SOURCE_BLOCKS * BLOCK_SIZE


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"name": "a b", "prompt": "x"}, "body.name", "pattern"),
        ({"name": "", "prompt": "x"}, "body.name", "pattern"),
        ({"prompt": "x" * 40}, "body.name", "required"),
        ({"name": "a"}, "body", "exactly one of prompt, messages and prompt_token_ids, not none"),
        ({"name": "a", "prompt": "x", "messages": [{}]}, "body", "exactly one of"),
        ({"name": "a", "prompt": ""}, "body.prompt", "at least 1"),
        ({"name": "a", "prompt": "x", "ttl_s": 0}, "body.ttl_s", "greater than or equal to 1"),
        ({"name": "a", "prompt": "x", "ttl": 5}, "body.ttl", "not permitted"),
        ({"name": "a", "prompt_token_ids": [-1]}, "body.prompt_token_ids.0", "greater than"),
        ({"name": "a", "prompt_token_ids": [1.5]}, "body.prompt_token_ids.0", "integer"),
        ({"name": "a", "prompt_token_ids": [10**6]}, "prompt_token_ids", "1000000"),
        ({"name": "a", "prompt": "x" * 97}, "prompt", "97 tokens, more than this server's limit"),
        (
            {"name": "a", "prompt": "x" * 31},
            "prompt",
            "31 of the source's 31 tokens, which fill no block",
        ),
        ({"name": "a", "prompt_token_ids": [9] * 97}, "prompt_token_ids", "97 tokens, more than"),
        ({"name": "a", "prompt": "x", "ttl_s": True}, "body.ttl_s", "valid number"),
        ({"name": "a", "messages": [{"role": 5}]}, "messages", "messages: "),
        ({"name": "a", "prompt": "x" * 40, "cache_salt": ""}, "cache_salt", "non-empty"),
        ({"name": "a", "prompt": "x" * 40, "cache_salt": " b"}, "cache_salt", "printable"),
        ({"name": "a", "prompt": "x" * 40, "cache_salt": "b\n"}, "cache_salt", "printable"),
    ],
)
def test_sources_that_are_refused(url: str, body: dict[str, Any], param: str, message: str) -> None:
    expect_error(post(url, **body), 400, param, message)


def test_a_name_means_one_thing(url: str) -> None:
    pin(url, "voice", source_of(6))
    expect_error(
        post(url, name="voice", prompt_token_ids=source_of(7)), 409, "name", "names another source"
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("extra", "status", "message"),
    [
        ({"vllm_xargs": {"kv_source": "nobody"}}, 404, "no such source here"),
        ({"vllm_xargs": {"kv_source": 5}}, 400, "must be a name"),
        ({"vllm_xargs": {"kv_source": "a", "kv_source_len": 3}}, 400, "its own kv_source_len"),
        ({"vllm_xargs": {"kv_source": "a"}, "use_beam_search": True}, 400, "not with use_beam"),
        ({"vllm_xargs": {"kv_source": True}}, 400, "kv_source=True: must be a name"),
        ({"vllm_xargs": {"kv_source": "a"}, "echo": True}, 400, "not with echo"),
    ],
)
def test_requests_that_are_refused(
    url: str, extra: dict[str, Any], status: int, message: str, stream: bool
) -> None:
    before = metrics(url).refusals()["kv_source"]
    body = {"model": SERVED, "prompt": "x", "max_tokens": 3, "stream": stream, **extra}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    expect_error(response, status, "kv_source", message)
    assert metrics(url).refusals()["kv_source"] == before + 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"vllm_xargs": {"kv_window": True}}, "kv_window=True: must be an integer, got bool"),
        (
            {"vllm_xargs": {"kv_window": 9}, "use_beam_search": True},
            "kv_window=9: not with use_beam",
        ),
    ],
)
def test_what_vllms_own_parsing_would_hide(url: str, extra: dict[str, Any], message: str) -> None:
    body = {"model": SERVED, "prompt": "x", "max_tokens": 3, **extra}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    expect_error(response, 400, "kv_window", message)


def test_a_salt_that_is_not_ascii(url: str) -> None:
    """Headers are bytes: what was pinned under it can be seen and let go."""
    pin(url, "voice", source_of(9), cache_salt="bl\u00e4u \u6c34")
    header = {"X-Cache-Salt": "bl\u00e4u \u6c34".encode()}
    found = httpx.get(f"{url}{SOURCES}", headers=header, timeout=TIMEOUT_S).json()["data"]
    assert [source["name"] for source in found] == ["voice"]
    gone = httpx.delete(f"{url}{SOURCES}/voice", headers=header, timeout=TIMEOUT_S)
    assert gone.status_code == 200


def test_source_and_prompt_must_leave_room(url: str) -> None:
    pin(url, "voice", source_of(8))
    with pytest.raises(openai.BadRequestError, match="leaves no room for an answer"):
        openai_client(url).completions.create(
            model=SERVED,
            prompt=random_prompt(MAX_LEN - SOURCE_LEN),
            max_tokens=1,
            stream=True,
            extra_body={"vllm_xargs": {"kv_source": "voice"}},
        )


def test_deleted_while_it_is_computed(url: str) -> None:
    """All slots are busy, so its computation waits; the client is told what has happened."""
    with ExitStack() as streams:
        for seed in range(SLOTS):
            ask = Ask(random_prompt(10, seed=seed), MAX_LEN - 20)
            streams.enter_context(running_stream(url, ask))
        with in_background(
            lambda: post(url, name="voice", prompt_token_ids=source_of(10))
        ) as answer:
            wait_until(lambda: listed(url)["data"], lambda data: len(data) == 1)
            assert delete(url, "voice").status_code == 200
            streams.close()
            expect_error(answer.result(), 409, "name", "was deleted, or its ttl_s ended, before")
    assert listed(url)["data"] == []


def test_an_escaped_key(url: str) -> None:
    """JSON may write a letter by its number."""
    pin(url, "voice", source_of(11))
    args = '{"kv_sourc\\u0065": "voice"}'
    answer = httpx.post(
        f"{url}/v1/completions",
        content=f'{{"model": "{SERVED}", "prompt": "x", "max_tokens": 2, "vllm_xargs": {args}}}',
        headers={"Content-Type": "application/json"},
        timeout=TIMEOUT_S,
    )
    assert answer.json()["usage"]["prompt_tokens"] == SOURCE_LEN + 1


@pytest.mark.parametrize("content", [b'{"kv_source"', b'{"kv_a":' + b"[" * 200_000])
def test_a_body_that_is_not_json_is_vllms_to_answer(url: str, content: bytes) -> None:
    response = httpx.post(
        f"{url}/v1/completions",
        content=content,
        headers={"Content-Type": "application/json"},
        timeout=TIMEOUT_S,
    )
    assert response.status_code in (400, 422)
