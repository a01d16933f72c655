"""One completion over HTTP as it arrives: server-sent events with as little work as Python allows.

The stock client costs more per token than a tiny model does, and would be what is measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 120.0
"""Longest silence of a server that is starved of processor time."""
READ_BYTES = 1 << 16


class StreamError(RuntimeError):
    """A stream that was refused, or did not end as it should."""


@dataclass(frozen=True)
class Piece:
    """One event of a stream."""

    seconds: float
    """When it arrived, by `time.perf_counter`."""
    token_ids: list[int]
    text: str
    finish_reason: str | None


class Completion:
    """A greedy streamed completion of exactly `max_tokens` tokens, as a context manager.

    Args:
        url: the server's address.
        model: the name it serves.
        prompt: token ids.
        request_id: part of the id that the server shows for it.
    """

    def __init__(
        self, url: str, model: str, prompt: list[int], max_tokens: int, request_id: str
    ) -> None:
        self.max_tokens = max_tokens
        self._connection = _ask(
            url, model, prompt, max_tokens, request_id, stream=True, return_token_ids=True
        )

    def __enter__(self) -> Completion:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()  # a stream that is left early is cancelled by this

    def pieces(self) -> Iterator[Piece]:
        """Every event with tokens, in order, as it arrives.

        Raises:
            StreamError: when it is refused, breaks off or has another length.
        """
        num_tokens, reason = 0, None
        for seconds, event in self._events():
            for choice in event.get("choices", ()):
                piece = Piece(seconds, choice["token_ids"], choice["text"], choice["finish_reason"])
                num_tokens += len(piece.token_ids)
                reason = piece.finish_reason or reason
                yield piece
        if (num_tokens, reason) != (self.max_tokens, "length"):
            raise StreamError(
                f"a stream of {self.max_tokens:,} tokens ended after {num_tokens:,}, "
                f"finish_reason {reason!r}"
            )

    def _events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        response = self._connection.getresponse()
        if response.status != 200:
            raise StreamError(f"HTTP {response.status}: {response.read().decode()[:500]}")
        rest = b""
        while data := response.read1(READ_BYTES):
            seconds = time.perf_counter()
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                content = event.removeprefix(b"data: ")
                if content == b"[DONE]":
                    return
                parsed = json.loads(content)
                if "error" in parsed:
                    raise StreamError(f"the server says: {parsed['error']}")
                yield seconds, parsed


def whole_completion(
    url: str, model: str, prompt: list[int], max_tokens: int, request_id: str
) -> None:
    """A greedy completion of exactly `max_tokens` tokens that comes as one answer.

    Raises:
        StreamError: when it is refused, or has another length.
    """
    connection = _ask(url, model, prompt, max_tokens, request_id)
    try:
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise StreamError(f"HTTP {response.status}: {answer.decode()[:500]}")
        num_tokens = json.loads(answer)["usage"]["completion_tokens"]
        if num_tokens != max_tokens:
            raise StreamError(f"{num_tokens:,} tokens came, not {max_tokens:,}")
    finally:
        connection.close()


def _ask(
    url: str, model: str, prompt: list[int], max_tokens: int, request_id: str, **more: bool
) -> HTTPConnection:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    connection = HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection
