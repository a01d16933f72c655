"""The embedded voice's server with a key, and what it shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bounded_kv_server.cli import NAME, embedded_flags
from bounded_kv_speech.package import BUILT_IN, model_of
from support.server import Metrics, parse_metrics, serving, wait_until
from vllm_bounded_kv.launch import VllmServer

CLIENTS = 16
KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
_CLIENT = httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))
"""Of all threads: making one takes a while, in which no other thread asks."""
TEXTS = [f"There are {word} of us here today." for word in ("two", "three", "four", "five")]


@contextmanager
def serving_voice(voices: Path) -> Iterator[VllmServer]:
    """The server; uploaded voices lie in `voices`."""
    flags = [
        *embedded_flags(BUILT_IN, CLIENTS),
        *("--api-key", KEY, "--voices-dir", str(voices)),
    ]
    with serving(model_of(BUILT_IN), flags) as server:
        yield server


def say(server: VllmServer, text: str, **options: Any) -> bytes:
    body = {"model": NAME, "input": text, "response_format": "pcm", "seed": 1, **options}
    answer = _CLIENT.post(f"{server.url}/v1/audio/speech", json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return answer.content


def shown(server: VllmServer) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/v1/bounded_kv", headers=HEADERS, timeout=60)
    values: dict[str, Any] = answer.raise_for_status().json()
    return values


def metrics_of(server: VllmServer) -> Metrics:
    return parse_metrics(httpx.get(f"{server.url}/metrics", timeout=60).raise_for_status().text)


def wait_until_silent(server: VllmServer) -> None:
    wait_until(
        lambda: shown(server),
        lambda now: (
            now["slots_used"] == 0
            and now["pool_blocks_free"] == now["pool_blocks"] - now["pinned_blocks"]
        ),
    )
