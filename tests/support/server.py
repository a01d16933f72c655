"""Servers under test: requests through the stock `openai` client, and what the servers show."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server_processes import family, is_named, let_front_end_go_first
from benchmarks.tiny_llama import TinyLlama
from support.engine import Answer, Ask
from vllm_bounded_kv.launch import VllmServer

SERVED = "tiny"
"""The name that the tiny model is served by."""

BLOCK_SIZE = 32
"""Entries of a block on CPU, where `--block-size` is not given."""

TINY = TinyLlama()
BLOCK_BYTES = TINY.num_layers * 2 * TINY.num_kv_heads * TINY.head_dim * 4 * BLOCK_SIZE
"""Of the tiny model in float32: keys and values of every layer."""

TIMEOUT_S = 60.0

MAX_POSITIONS = 65_536
"""Of the tiny model where streams are not to end: it has 8,192 of its own."""
ENDLESS = 60_000
"""Tokens of a stream that no test waits for. The engine does not stand still while a test does: one
of 7,000 was over before its test had looked at it once."""

T = TypeVar("T")


def tiny_server_flags(num_blocks: int) -> list[str]:
    """Flags for the tiny model with `num_blocks` blocks that streams can hold."""
    return [
        *("--served-model-name", SERVED, "--dtype", "float32", "--enforce-eager"),
        # One more is vLLM's null block.
        *("--kv-cache-memory-bytes", str((num_blocks + 1) * BLOCK_BYTES)),
    ]


@contextmanager
def serving(
    model: Path, flags: Sequence[str], env: dict[str, str] | None = None
) -> Iterator[VllmServer]:
    """A server whose front end comes before its engine."""
    with VllmServer(model, flags, env) as server:
        put_front_end_first(server)
        yield server


def put_front_end_first(server: VllmServer) -> None:
    """Before its engine, as it is now: one that is started again has to be put first again."""
    assert server.process is not None
    let_front_end_go_first(server.process.pid)


def processes(server: VllmServer, *names: str) -> list[psutil.Process]:
    """The server's processes whose titles contain one of `names`."""
    assert server.process is not None
    return [process for process in family(server.process.pid) if is_named(process, *names)]


def openai_client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


# --- requests


def completion_stream(url: str, ask: Ask, headers: dict[str, str] | None = None) -> Any:
    """The raw chunks of a greedy streamed completion."""
    return openai_client(url).completions.create(
        model=SERVED,
        prompt=ask.prompt,
        max_tokens=ask.max_tokens,
        temperature=0,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True, "vllm_xargs": ask.args},
        extra_headers=headers,
    )


def complete(
    url: str,
    ask: Ask,
    on_chunk: Callable[[int], None] | None = None,
    prompt_tokens: int | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Stream one completion to its end.

    Args:
        on_chunk: called with the number of tokens so far after each chunk.
        prompt_tokens: what the usage must count; `None`: the prompt's.
        headers: sent with the request.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    usage: Any = None
    reasons = []
    with closing(completion_stream(url, ask, headers)) as chunks:
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                tokens += choice.token_ids
                logprobs += choice.logprobs.token_logprobs
                reasons += [choice.finish_reason] if choice.finish_reason else []
            if on_chunk is not None:
                on_chunk(len(tokens))
    assert reasons == ["length"]
    counted = (usage.prompt_tokens, usage.completion_tokens)
    assert counted == (prompt_tokens or len(ask.prompt), len(tokens))
    details = usage.prompt_tokens_details
    return Answer(tokens, logprobs, (details and details.cached_tokens) or 0)


def complete_all(url: str, asks: Sequence[Ask]) -> list[Answer]:
    """Stream completions, all at once."""
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(lambda ask: complete(url, ask), asks))


@contextmanager
def running_stream(url: str, ask: Ask, headers: dict[str, str] | None = None) -> Iterator[Any]:
    """A stream that has begun and is read no further; closing the connection aborts it."""
    with closing(completion_stream(url, ask, headers)) as chunks:
        next(iter(chunks))
        yield chunks


@contextmanager
def in_background(call: Callable[[], T]) -> Iterator[Future[T]]:
    """Run `call` beside the block, and wait for it at the end."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)


# --- what the server shows


def figures(url: str) -> dict[str, Any]:
    """`GET /v1/bounded_kv`."""
    response = httpx.get(f"{url}/v1/bounded_kv", timeout=TIMEOUT_S)
    values: dict[str, Any] = response.raise_for_status().json()
    return values


@dataclass(frozen=True)
class Metrics:
    """One scrape of `/metrics`: `(name, labels, value)` of every sample."""

    samples: list[tuple[str, dict[str, str], float]]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over the samples of that name that carry those labels."""
        values = [
            value
            for sample, its_labels, value in self.samples
            if sample == name and labels.items() <= its_labels.items()
        ]
        if not values:
            raise KeyError(f"{name} {labels}")
        return sum(values)

    def names(self, prefix: str) -> set[str]:
        return {name for name, _, _ in self.samples if name.startswith(prefix)}

    def refusals(self) -> dict[str, float]:
        """Refusals by reason."""
        return {
            labels["reason"]: value
            for name, labels, value in self.samples
            if name == "bounded_kv_refusals_total"
        }


def parse_metrics(text: str) -> Metrics:
    families = text_string_to_metric_families(text)
    return Metrics([(s.name, dict(s.labels), s.value) for f in families for s in f.samples])


def metrics(url: str) -> Metrics:
    """`GET /metrics`."""
    return parse_metrics(httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).raise_for_status().text)


START_UP_LINE = re.compile(
    r"Bounded KV cache: (?P<slot_bytes>[\d,]+) bytes a slot "
    r"\(sink (?P<sink>\d+) \+ window (?P<window>\d+) entries in (?P<slot_blocks>\d+) blocks of "
    r"(?P<block_size>\d+)\); (?P<slots_total>\d+) slots in a pool of (?P<pool_blocks>\d+) blocks; "
    r"(?P<source_blocks>\d+) source blocks a stream can share; "
    r"(?P<max_pinned_blocks>\d+) blocks can be pinned\. "
    r"Rotary positions: (?P<positions>absolute|rebase, falling back at [\d,]+)\."
)


def start_up_line(server: VllmServer) -> dict[str, int]:
    """The numbers of the one line that the server prints about its cache."""
    (line,) = START_UP_LINE.finditer(server.log)
    numbers = {name: value for name, value in line.groupdict().items() if name != "positions"}
    return {name: int(value.replace(",", "")) for name, value in numbers.items()}


# --- waiting


def wait_until(
    read: Callable[[], T], is_right: Callable[[T], bool], timeout_s: float = TIMEOUT_S
) -> T:
    """Read until the reading is right, and return it.

    Raises:
        AssertionError: with the last reading, when it never is.
    """
    end = time.monotonic() + timeout_s
    while True:
        reading = read()
        if is_right(reading):
            return reading
        assert time.monotonic() < end, f"not within {timeout_s} s; last seen: {reading}"
        time.sleep(0.02)


def is_idle(shown: dict[str, Any]) -> bool:
    """No stream holds anything: every block is back."""
    return (
        shown["slots_used"] == 0
        and shown["streams"] == []
        and shown["source_blocks_held"] == 0
        and shown["pool_blocks_free"] == shown["pool_blocks"] - shown["pinned_blocks"]
    )


def wait_until_idle(url: str) -> dict[str, Any]:
    """The figures once every block is back in the pool."""
    return wait_until(lambda: figures(url), is_idle)
