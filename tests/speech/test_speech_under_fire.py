"""The speech server under fire, with a key: see `tests/http/test_under_fire.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from bounded_kv_speech.frames import SAMPLE_RATE
from support.fire import Scale, leave_at_random, send_malformed, sip, slow_readers
from support.held import held, wait_until_back
from support.server import wait_until
from support.voice_server import CLIENTS, HEADERS, KEY, TEXTS, say, wait_until_silent
from vllm_bounded_kv.launch import VllmServer

FORMATS = ("pcm", "mp3", "opus", "flac", "wav", "aac")
MOST_ABORTS = 200
"""In the short form."""
OURS = ("/v1/audio", "/v1/bounded_kv")
IDLE_S = 60.0
"""`--speech-idle-s`, by default."""
CALL_S = 30.0


def body(i: int) -> dict[str, Any]:
    return {"input": " ".join(TEXTS), "response_format": FORMATS[i % len(FORMATS)]}


def test_who_leaves_leaves_nothing(server: VllmServer, scale: Scale) -> None:
    first = say(server, TEXTS[0])
    wait_until_silent(server)
    count = max(MOST_ABORTS, scale.aborts)

    def leave(count: int) -> None:
        leave_at_random(server.url, "/v1/audio/speech", body, count, HEADERS)
        wait_until_silent(server)

    leave(count // 2)  # it settles what is only made once
    before = held(server)
    leave(count // 2)
    wait_until_back(server, before)
    assert say(server, TEXTS[0]) == first


def test_four_times_as_many_speak_as_may_sound(server: VllmServer, scale: Scale) -> None:
    """The others wait in the queue, which is as long; nobody is sent away."""

    def crowd() -> None:
        with ThreadPoolExecutor(4 * CLIENTS) as pool:
            for sound in pool.map(lambda i: say(server, "Yes.", seed=i), range(4 * CLIENTS)):
                assert len(sound) > SAMPLE_RATE // 5
        wait_until_silent(server)

    if scale.rounds > 1:
        crowd()  # or else others have
    before = held(server)
    for _ in range(scale.rounds):
        crowd()
    wait_until_back(server, before)


def test_slow_listeners_keep_nobody_waiting(server: VllmServer, scale: Scale) -> None:
    before = held(server)
    asked = {"input": " ".join(TEXTS * 25), "response_format": "wav"}
    count = min(scale.slow_readers, CLIENTS - 1)
    with slow_readers(server.url, "/v1/audio/speech", asked, count, HEADERS) as readers:
        sip(readers, scale.slow_s)
        assert say(server, TEXTS[0])
    wait_until_back(server, before)


@pytest.mark.parametrize("route", ["/v1/audio/speech", "/v1/audio/voices"])
def test_what_is_malformed_is_refused(server: VllmServer, scale: Scale, route: str) -> None:
    send_malformed(server, route, HEADERS, scale)
    before = held(server)
    send_malformed(server, route, HEADERS, scale)
    wait_until_back(server, before)


def test_idle_sockets_and_listeners_are_let_go_by_the_clock(
    server: VllmServer, request: pytest.FixtureRequest
) -> None:
    """In short, by a clock that jumps: `test_speech_session.py`."""
    if not request.config.getoption("--torture"):
        pytest.skip("a minute, in `make torture`")
    from websockets.sync.client import connect

    before = held(server)
    asked = {"input": " ".join(TEXTS * 25), "response_format": "wav"}
    where = server.url.replace("http", "ws") + "/v1/audio/speech/stream"
    with (
        slow_readers(server.url, "/v1/audio/speech", asked, 1, HEADERS),
        connect(where, additional_headers=HEADERS, open_timeout=60) as idle,
    ):
        idle.send(json.dumps({"type": "session.config"}))
        assert json.loads(idle.recv(timeout=60))["type"] == "session.ready"
        ready = time.monotonic()
        said = json.loads(idle.recv(timeout=2 * IDLE_S))
        took = time.monotonic() - ready
        assert "--speech-idle-s" in said["error"]["message"]
        assert IDLE_S - 1 < took < IDLE_S + 5
        # The listener who reads nothing has lost its place, too; its connection is still there.
        wait_until(lambda: held(server), lambda now: now.speech == 0, 2 * IDLE_S)
        assert held(server).blocks == before.blocks
    wait_until_back(server, before)


# --- the OpenAPI document


@pytest.fixture(scope="module")
def document(server: VllmServer) -> Iterator[Any]:
    yield schemathesis.openapi.from_url(server.url + "/openapi.json")


def test_every_route_wants_the_key(server: VllmServer, document: Any) -> None:
    paths = {path: at for path, at in document.raw_schema["paths"].items() if "/v1/" in path}
    assert {"/v1/completions", "/v1/bounded_kv/sources", "/v1/audio/speech"} <= set(paths)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path, methods in paths.items():
            for method in methods:
                for headers in ({}, {"Authorization": "Bearer not-" + KEY}):
                    to = path.replace("{", "").replace("}", "")
                    answer = client.request(method, to, json={}, headers=headers)
                    assert answer.status_code == 401, (method, path)


def test_whatever_the_document_allows_is_no_server_error(
    server: VllmServer, document: Any, scale: Scale, request: pytest.FixtureRequest
) -> None:
    """Of our own routes; of all, in `make torture`, which shows what vLLM's own cannot take."""
    in_full = request.config.getoption("--torture")
    before, others = held(server), []
    for result in document.get_all_operations():
        operation = result.ok()
        is_ours = operation.path.startswith(OURS)
        if not is_ours and not (in_full and operation.path.startswith("/v1/")):
            continue

        @settings(
            max_examples=scale.examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            import requests

            try:
                answer = case.call(headers=HEADERS, timeout=CALL_S)
            except requests.exceptions.Timeout:
                return  # it has asked for more than can be made in this time
            assert answer.status_code != 401, "the key was sent"
            case.validate_response(answer, checks=[not_a_server_error])

        try:
            call()
        except Exception as error:
            if is_ours:
                raise
            others.append(f"{operation.method} {operation.path}: {error!r:.300}")
    for each in others:
        print(each)
    for voice in httpx.get(f"{server.url}/v1/audio/voices", headers=HEADERS).json()["data"]:
        httpx.delete(f"{server.url}/v1/audio/voices/{voice.get('name')}", headers=HEADERS)
    where = f"{server.url}/v1/bounded_kv/sources"
    for source in httpx.get(where, headers=HEADERS).json()["data"]:
        httpx.delete(f"{where}/{source['name']}", headers=HEADERS)
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    wait_until_silent(server)
    assert held(server).slots == before.slots
