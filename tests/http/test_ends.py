"""How a server ends, and begins again: its engine is killed, and it is told to.

A server of text; `make torture` has one of speech, too.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bounded_kv_server.cli import NAME, embedded_flags
from bounded_kv_speech.package import BUILT_IN, model_of
from support.fire import connection, request
from support.server import (
    ENDLESS,
    MAX_POSITIONS,
    SERVED,
    figures,
    is_idle,
    processes,
    put_front_end_first,
    tiny_server_flags,
    wait_until,
)
from support.supervisor import Supervised

SLOTS = 4
DRAIN_S = 8
"""`--shutdown-timeout`."""
SOON_S = 30.0
"""On a machine that does much else; a second or two on one that does not."""
AGAIN_S = 400.0
BUSY = {"text": 3, "speech": 6}
"""Slots that `clients` take; an idle socket's takes its stream only when there is text."""
TEXT = "There are two of us here today. " * 60


@pytest.fixture(scope="module", params=["text", "speech"])
def supervised(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Supervised, str]]:
    kind = request.param
    if kind == "speech" and not request.config.getoption("--torture"):
        pytest.skip("only in `make torture`")
    drain = ("--shutdown-timeout", str(DRAIN_S))
    model, flags = model_of(BUILT_IN), [*embedded_flags(BUILT_IN, 8), *drain]
    if kind == "text":
        model, flags = (
            tiny_model,
            [
                *tiny_server_flags(6 * SLOTS),
                *("--hf-overrides", json.dumps({"max_position_embeddings": MAX_POSITIONS})),
                *("--kv-plugin", "bounded", "--bounded-kv-window", "124", *drain),
                *("--max-num-seqs", "8", "--api-server-count", "1"),
            ],
        )
    with Supervised(model, flags, tmp_path_factory.mktemp("ends") / "codes") as server:
        put_front_end_first(server)
        yield server, kind


def read_text(url: str, kind: str, max_tokens: int, stream: bool) -> str:
    """What is said of a completion at its end."""
    body = {
        "model": SERVED if kind == "text" else NAME,
        "prompt": [65, 66, 67],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line]
    if not stream:
        return "".join(lines)
    assert lines[-1] == "data: [DONE]"
    return lines[-2]


def read_speech(url: str, stream_format: str) -> str:
    body = {"input": TEXT, "response_format": "pcm", "stream_format": stream_format}
    got = b""
    with httpx.stream("POST", f"{url}/v1/audio/speech", json=body, timeout=120) as answer:
        try:
            for part in answer.iter_raw():
                got = (got + part)[-400:]
        except httpx.RemoteProtocolError:
            return "broken, after " + (got.decode() if stream_format == "sse" else "sound")
    return "whole"


def read_socket(url: str, text: str) -> str:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    said = []
    where = url.replace("http", "ws") + "/v1/audio/speech/stream"
    with connect(where, open_timeout=60) as line:
        line.send(json.dumps({"type": "session.config"}))
        line.send(json.dumps({"type": "input.text", "text": text}))
        try:
            while True:
                message = line.recv(timeout=120)
                said += [message] if isinstance(message, str) else []
        except ConnectionClosed:
            return f"{said[-1]} {line.close_code}"


@contextmanager
def clients(url: str, kind: str) -> Iterator[dict[str, Future[str]]]:
    """Some that wait for what they have asked, and one that reads nothing."""
    begun: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(8) as pool, connection(url, 4096) as stalled:
        long = ENDLESS if kind == "text" else 1900
        asked = {"model": SERVED, "prompt": [65], "max_tokens": long, "ignore_eos": True}
        path, how = "/v1/completions", {"stream": True}
        if kind == "speech":
            asked, path, how = {"input": TEXT, "response_format": "wav"}, "/v1/audio/speech", {}
        stalled.sendall(request(path, json.dumps({**asked, **how}).encode(), {}))
        begun["stream"] = pool.submit(read_text, url, kind, long, True)
        begun["whole"] = pool.submit(read_text, url, kind, long, False)
        if kind == "speech":
            begun["audio"] = pool.submit(read_speech, url, "audio")
            begun["events"] = pool.submit(read_speech, url, "sse")
            begun["socket"] = pool.submit(read_socket, url, TEXT)
            begun["idle socket"] = pool.submit(read_socket, url, "")
        wait_until(lambda: figures(url)["slots_used"], lambda used: used >= BUSY[kind], AGAIN_S)
        yield begun


def health(url: str) -> int | None:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code
    except httpx.HTTPError:
        return None


def test_a_server_whose_engine_is_killed_is_started_again(
    supervised: tuple[Supervised, str],
) -> None:
    server, kind = supervised
    (engine,) = processes(server, "EngineCore")
    with clients(server.url, kind) as asked:
        began = time.monotonic()
        engine.kill()
        wait_until(lambda: health(server.url), lambda code: code != 200, SOON_S)
        wait_until(lambda: server.codes, lambda codes: codes == [1], SOON_S)
        took = time.monotonic() - began
        ends: dict[str, Any] = {}
        for name, end in asked.items():
            try:
                ends[name] = end.result(SOON_S)
            except httpx.HTTPError as error:
                ends[name] = error
    print(f"{kind}: exit code 1 after {took:.1f} s; {ends}")
    assert "error" in ends["stream"]
    assert isinstance(ends["whole"], Exception) or "error" in ends["whole"]
    if kind == "speech":
        assert ends["audio"] == "broken, after sound"
        assert "the engine is gone" in ends["events"]
        assert ends["socket"].endswith(("1012", "1013"))
    wait_until(lambda: health(server.url), lambda code: code == 200, AGAIN_S)
    assert '"finish_reason":"length"' in read_text(server.url, kind, 5, True)
    wait_until(lambda: figures(server.url), is_idle)


def test_a_server_that_is_told_to_end_lets_streams_end(supervised: tuple[Supervised, str]) -> None:
    """Those that do within `--shutdown-timeout`; the others are told, or cut off."""
    server, kind = supervised
    assert server.process is not None
    put_front_end_first(server)
    with clients(server.url, kind) as asked, ThreadPoolExecutor(1) as pool:
        short = pool.submit(read_text, server.url, kind, 100, True)
        wait_until(
            lambda: figures(server.url)["slots_used"],
            lambda used: used > BUSY[kind] or short.done(),
        )
        began = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)
        assert '"finish_reason":"length"' in short.result(SOON_S)
        if kind == "speech":
            assert "session.closed" in asked["idle socket"].result(DRAIN_S)
        assert server.process.wait(DRAIN_S + SOON_S) == 0
        took = time.monotonic() - began
        ends = {name: end.exception(SOON_S) or end.result() for name, end in asked.items()}
    print(f"{kind}: exit code 0 after {took:.1f} s; {ends}")
    assert server.codes == [1, 0]
    assert took > DRAIN_S - 1 or kind == "speech", "it did not wait for what was on its way"
