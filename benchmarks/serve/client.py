"""One streamed completion as it arrives, and a server's metrics."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

NUM_BLOCKS = "num_gpu_blocks"
"""A label of `vllm:cache_config_info`, on CPUs too."""
TIMEOUT_S = 600.0
"""Of a whole answer."""


class AskError(RuntimeError):
    """A stream that was refused, or did not end as it should."""


@dataclass
class Answer:
    """When the tokens of one request came, by `time.perf_counter`."""

    begun: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """To the first token."""
        return self.times[0] - self.begun

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        """Mean of the gaps."""
        return (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)


def session() -> aiohttp.ClientSession:
    """For any number of requests at once."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
    )


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    on_token: Callable[[Answer], Any] | None = None,
) -> Answer:
    """Ask for exactly `max_tokens` tokens; `on_token` is called as each event comes.

    Tokens that come in one event share the time since the last.

    Raises:
        AskError: when the request is refused or another number of tokens came.
    """
    answer = Answer()
    async for num_tokens in _events(http, url, body):
        now = time.perf_counter()
        last = answer.times[-1] if answer.times else now
        answer.times += [last + (now - last) * (i + 1) / num_tokens for i in range(num_tokens)]
        if on_token is not None:
            on_token(answer)
    if len(answer.times) != body["max_tokens"]:
        raise AskError(f"{len(answer.times):,} tokens came, not {body['max_tokens']:,}")
    return answer


async def _events(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[int]:
    try:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise AskError(f"HTTP {response.status}: {_message(await response.text())}")
            async for line in response.content:
                content = line.strip().removeprefix(b"data:").strip()
                if not content or content == b"[DONE]":
                    continue
                event = json.loads(content)
                if "error" in event:
                    raise AskError(_message(content.decode()))
                for choice in event.get("choices", ()):
                    if num_tokens := _num_tokens(choice):
                        yield num_tokens
    except (TimeoutError, aiohttp.ClientError) as error:
        raise AskError(f"{type(error).__name__}: {error}") from error


def _num_tokens(choice: dict[str, Any]) -> int:
    """By the ids, where the server gives them; else an event with text is one token."""
    ids = choice.get("token_ids")
    return len(ids) if ids is not None else int(bool(choice.get("text")))


def _message(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return text[:300]


async def metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Every sample by its name, summed over labels; none where the server shows none.

    vLLM's number of blocks, which is a label of a metric, is `NUM_BLOCKS`.
    """
    try:
        async with http.get(f"{url}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
    except aiohttp.ClientError:
        return {}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
            if sample.labels.get(NUM_BLOCKS, "").isdigit():
                found[NUM_BLOCKS] = float(sample.labels[NUM_BLOCKS])
    return found
