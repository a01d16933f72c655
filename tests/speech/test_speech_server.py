"""The embedded voice behind one real server: what its clients hear, alone, together and gone."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from bounded_kv_server.cli import NAME
from bounded_kv_speech.frames import SAMPLE_RATE
from support.sounds import samples_of
from support.voice_server import (
    CLIENTS,
    HEADERS,
    KEY,
    TEXTS,
    metrics_of,
    say,
    shown,
    wait_until_silent,
)
from vllm_bounded_kv.launch import VllmServer

VOICES = ("heart", "robin", "sage", "reed", "otto")
HEALTH_SHARE = 0.5
"""Of the time that all speak, which it would take if it waited for them."""
NEAR_STEP = 1
"""Of 16 bits."""


def test_six_formats_are_the_same_sound(server: VllmServer) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)
    heard = {}
    for format in ("pcm", "wav", "flac", "mp3", "opus", "aac"):
        asked: Any = {"response_format": format, "voice": "heart", "extra_body": {"seed": 1}}
        with client.audio.speech.with_streaming_response.create(
            model=NAME, input=TEXTS[0], **asked
        ) as answer:
            heard[format] = samples_of(b"".join(answer.iter_bytes()), format)
    seconds = len(heard["pcm"]) / SAMPLE_RATE
    assert 0.5 < seconds < 6
    for format, samples in heard.items():
        assert abs(len(samples) / SAMPLE_RATE - seconds) < 0.1, format
        if format in ("wav", "flac"):
            assert np.array_equal(samples, heard["pcm"])
    assert np.abs(heard["pcm"]).max() > 1000


def test_sound_comes_before_the_last_is_made(server: VllmServer) -> None:
    body = {"input": " ".join(TEXTS), "response_format": "pcm"}
    start, times = time.monotonic(), []
    with httpx.stream(
        "POST", f"{server.url}/v1/audio/speech", json=body, headers=HEADERS, timeout=120
    ) as answer:
        for _ in answer.iter_raw():
            times.append(time.monotonic() - start)
    assert times[0] < 0.5 * times[-1]


def test_together_as_alone(server: VllmServer) -> None:
    """Greedy, and by seeds; in all voices. Where two tokens are as likely, one may part."""

    def one(i: int) -> np.ndarray:
        options = {"voice": VOICES[i % 5], "temperature": 0.0 if i % 2 else 0.7}
        return np.frombuffer(say(server, TEXTS[i % 4], **options), "<i2").astype(int)

    alone = [one(i) for i in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(one, range(CLIENTS)))
    same = [
        len(a) == len(b) and np.abs(a - b).max() <= NEAR_STEP
        for a, b in zip(alone, together, strict=True)
    ]
    assert sum(same) >= CLIENTS - 1, same
    for i, (a, b) in enumerate(zip(alone, together, strict=True)):
        if not same[i]:  # equal up to where the tokens parted
            assert np.abs(a[: SAMPLE_RATE // 4] - b[: SAMPLE_RATE // 4]).max() <= NEAR_STEP


def test_health_answers_and_metrics_move_under_load(server: VllmServer) -> None:
    before = metrics_of(server)
    with ThreadPoolExecutor(CLIENTS) as pool, httpx.Client(timeout=30) as health:
        spoken = [pool.submit(say, server, TEXTS[i % 4]) for i in range(CLIENTS)]
        took, begun = [], time.monotonic()
        while not all(each.done() for each in spoken):
            start = time.monotonic()
            assert health.get(f"{server.url}/health").status_code == 200
            took.append(time.monotonic() - start)
            time.sleep(0.02)
    whole = time.monotonic() - begun
    assert statistics.quantiles(took, n=100)[-1] < HEALTH_SHARE * whole, "it waits for speech"
    audio = sum(len(each.result()) for each in spoken) / 2 / SAMPLE_RATE
    after = metrics_of(server)
    name = "bounded_kv_speech_requests_total"
    assert after(name, outcome="ok") - before(name, outcome="ok") == CLIENTS
    name = "bounded_kv_speech_audio_seconds_total"
    assert after(name) - before(name) == pytest.approx(audio, rel=0.01)
    assert after("bounded_kv_speech_voices") == len(VOICES)


def test_the_key_guards_every_route(server: VllmServer) -> None:
    from websockets.exceptions import InvalidStatus, WebSocketException
    from websockets.sync.client import connect

    for method, path in [("POST", "speech"), ("GET", "voices"), ("DELETE", "voices/a")]:
        assert httpx.request(method, f"{server.url}/v1/audio/{path}").status_code == 401
    with pytest.raises((InvalidStatus, WebSocketException, EOFError)):
        connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream").recv(timeout=5)


def test_a_sample_is_a_voice(server: VllmServer) -> None:
    """One of the server's own speech: it sounds like its speaker."""
    sample = say(server, " ".join(TEXTS[:2]), voice="otto", response_format="wav")
    answer = httpx.post(
        f"{server.url}/v1/audio/voices",
        data={"name": "second", "consent": "true"},
        files={"audio_sample": ("a.wav", sample)},
        headers=HEADERS,
        timeout=60,
    )
    assert answer.status_code == 201, answer.text
    assert len(say(server, TEXTS[0], voice="second")) > SAMPLE_RATE
    assert shown(server)["pinned_blocks"] > 0
    gone = httpx.delete(f"{server.url}/v1/audio/voices/second", headers=HEADERS)
    assert gone.status_code == 200


def test_a_socket_speaks_while_text_arrives(server: VllmServer) -> None:
    import json

    from websockets.sync.client import connect

    with connect(
        server.url.replace("http", "ws") + "/v1/audio/speech/stream",
        additional_headers=HEADERS,
        open_timeout=60,
    ) as socket:
        socket.send(json.dumps({"type": "session.config", "voice": "heart", "seed": 1}))
        assert json.loads(socket.recv(timeout=60))["type"] == "session.ready"
        for word in TEXTS[0].split():
            socket.send(json.dumps({"type": "input.text", "text": word + " "}))
        first = socket.recv(timeout=60)
        assert isinstance(first, bytes)  # before the text is done
        socket.send(json.dumps({"type": "input.text", "text": TEXTS[1]}))
        socket.send(json.dumps({"type": "session.close"}))
        sound = first
        while isinstance(message := socket.recv(timeout=60), bytes):
            sound += message
        assert json.loads(message)["type"] == "session.closed"
    whole = say(server, " ".join(TEXTS[:2]))
    assert sound == whole
    wait_until_silent(server)
