"""The speech routes over real HTTP, in front of tones instead of an engine."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import APIStatusError, OpenAI

from bounded_kv_server import upload as uploads
from bounded_kv_server import voices as server_voices
from bounded_kv_server.metrics import metrics
from bounded_kv_speech.wav import to_pcm
from support.sounds import samples_of
from support.speech_server import MOST, QUEUE, serving, wait_until
from support.tones import RATE, Tones

FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
TEXT = "One two three. Four five."
AUDIO_S = 0.5


@pytest.fixture(scope="module")
def model() -> Tones:
    return Tones()


@pytest.fixture(scope="module")
def server(model: Tones, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    with serving(model, tmp_path_factory.mktemp("voices")) as found:
        yield found


@pytest.fixture
def url(server: tuple[str, Any]) -> str:
    return server[0] + "/v1/audio/speech"


@pytest.fixture
def client(server: tuple[str, Any]) -> OpenAI:
    return OpenAI(base_url=server[0] + "/v1", api_key="none", max_retries=0, timeout=20)


@pytest.mark.parametrize("format", FORMATS)
def test_the_stock_client_gets_each_format(client: OpenAI, format: Any) -> None:
    answer = client.audio.speech.create(
        model="tones", input=TEXT, voice="high", response_format=format
    )
    found = samples_of(answer.read(), format)
    assert abs(len(found) / RATE - AUDIO_S) < 0.1
    if format in ("wav", "flac", "pcm"):
        pcm = client.audio.speech.create(
            model="tones", input=TEXT, voice="high", response_format="pcm"
        )
        assert np.array_equal(found, samples_of(pcm.read(), "pcm"))
        assert "rate=24000" in pcm.response.headers["content-type"]


def test_voice_seed_and_speed_are_heard(url: str) -> None:
    def said(**options: Any) -> bytes:
        body = {"input": TEXT, "response_format": "pcm", **options}
        answer = httpx.post(url, json=body)
        assert answer.status_code == 200, answer.text
        return answer.content

    assert said(voice={"id": "high"}) == said(voice="high") != said(voice="low") == said()
    assert said(seed=1) == said(seed=1) != said(seed=2)
    assert abs(len(said(speed=2.0)) / len(said()) - 0.5) < 0.1


def test_sound_comes_while_it_is_made(tmp_path: Path) -> None:
    with (
        serving(Tones(chunk_s=0.02), tmp_path) as (url, _),
        httpx.stream(
            "POST",
            url + "/v1/audio/speech",
            json={"input": "a " * 20, "response_format": "wav"},
        ) as answer,
    ):
        assert answer.headers["x-accel-buffering"] == "no"
        start = time.monotonic()
        parts = [(time.monotonic() - start, part) for part in answer.iter_raw()]
    assert parts[-1][0] - parts[0][0] > 1.0
    data = b"".join(part for _, part in parts)
    assert data.count(b"RIFF") == 1
    assert len(samples_of(data, "wav")) == 20 * 4 * RATE // 40


def events(text: str) -> list[dict[str, Any]]:
    return [
        json.loads(part.removeprefix("data: "))
        for part in text.split("\n\n")
        if part.startswith("data: ")
    ]


def test_events_carry_the_same_sound_and_end_in_usage(url: str) -> None:
    body = {"input": TEXT, "response_format": "pcm"}
    answer = httpx.post(url, json={**body, "stream_format": "sse"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done = events(answer.text)
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    sound = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert sound == httpx.post(url, json=body).content
    assert done["type"] == "speech.audio.done"
    assert done["usage"] == {"input_tokens": 7, "output_tokens": 22, "total_tokens": 29}


BAD = [
    ({"input": ""}, 400, "input"),
    ({"input": "?!"}, 400, "input"),
    ({"input": "a" * 4097}, 400, "4096"),
    ({}, 400, "input"),
    ({"input": 5}, 400, "input"),
    ({"input": "a", "voice": ""}, 400, "voice"),
    ({"input": "a", "voice": "nobody"}, 404, "low, high"),
    ({"input": "a", "voice": {"id": "nobody"}}, 404, "nobody"),
    ({"input": "a", "voice": {"name": "low"}}, 400, "voice"),
    ({"input": "a", "voice": "../../etc/passwd"}, 404, "voice"),
    ({"input": "a", "model": "another"}, 404, "another"),
    ({"input": "a", "response_format": "ogg"}, 400, "response_format"),
    ({"input": "a", "speed": 5}, 400, "speed"),
    ({"input": "a", "speed": 0.2}, 400, "speed"),
    ({"input": "a", "stream_format": "ws"}, 400, "stream_format"),
    ({"input": "a", "seed": -1}, 400, "seed"),
    ({"input": "a", "temperature": 3}, 400, "temperature"),
    ({"input": "a", "max_duration_s": 0}, 400, "max_duration_s"),
    ({"input": "a", "speaker": "low"}, 400, "speaker"),
    ({"input": "a", "cache_salt": ""}, 400, "cache_salt"),
    ({"input": "a", "cache_salt": "a/b"}, 400, "cache_salt"),
    ({"input": "a", "cache_salt": "a" * 129}, 400, "cache_salt"),
    ({"input": "silent"}, 500, "said"),
    ({"input": "fail"}, 500, "failed"),
    ({"input": "a b c", "max_duration_s": 0.02}, 400, "max_duration_s"),
]


@pytest.mark.parametrize(("body", "status", "named"), BAD)
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_what_fails_before_any_sound_has_a_status(
    url: str, model: Tones, body: dict[str, Any], status: int, named: str, stream_format: str
) -> None:
    # WAV: its header must not be taken for sound.
    body = {"stream_format": stream_format, "response_format": "wav", **body}
    answer = httpx.post(url, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status)
    assert named in json.dumps(error)
    wait_until(lambda: model.num_open == 0)


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"input": 5}', b'{"voice": "low"}', b"\xff", b'{"input": "?!"}']
)
def test_what_is_refused_is_counted(url: str, body: bytes) -> None:
    refused = metrics().requests.labels("refused")._value
    before = refused.get()
    answer = httpx.post(url, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert refused.get() == before + 1


def test_a_tenants_voice_is_not_pinned_for_all(server: tuple[str, Any], url: str) -> None:
    pinned = server[1].pins.pinned
    before = len(pinned)
    body = {"input": "a", "response_format": "pcm"}
    salted = httpx.post(url, json={**body, "cache_salt": "tenant"})
    assert (salted.status_code, len(pinned)) == (200, before)
    assert httpx.post(url, json=body).content == salted.content
    assert len(pinned) == before + 1


def test_openais_client_raises_what_it_should(client: OpenAI) -> None:
    with pytest.raises(APIStatusError, match="nobody"):
        client.audio.speech.create(model="tones", input="a", voice="nobody")


@pytest.mark.parametrize("text", ["One fail.", "a b c d e f g h i"])
def test_what_fails_later_breaks_the_transfer(url: str, model: Tones, text: str) -> None:
    body = {"input": text, "response_format": "pcm", "max_duration_s": 0.6}
    with pytest.raises(httpx.RemoteProtocolError), httpx.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200
        answer.read()
    with httpx.stream("POST", url, json={**body, "stream_format": "sse"}) as answer:
        text = ""
        with pytest.raises(httpx.RemoteProtocolError):
            for part in answer.iter_text():
                text += part
    assert [event["type"] for event in events(text)][-1] == "error"
    wait_until(lambda: model.num_open == 0)


def test_who_leaves_frees_everything(server: tuple[str, Any], url: str, model: Tones) -> None:
    for i in range(30):
        body = {"input": "forever" if i % 2 else "pause a", "response_format": FORMATS[i % 6]}
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.stream("POST", url, json=body, timeout=0.1) as answer,
        ):
            next(answer.iter_raw())
    wait_until(lambda: model.num_open == 0)
    gate = server[1].server.gate
    wait_until(lambda: (gate.num_active, gate.num_waiting) == (0, 0))


def test_a_word_has_been_said_before_anybody_asks(tmp_path: Path) -> None:
    model = Tones()
    with serving(model, tmp_path):
        assert model.is_started
        assert (model.num_opened, model.num_open) == (1, 0)


def test_there_is_a_queue_and_an_end_to_it(tmp_path: Path) -> None:
    model = Tones(pause_s=0.6)
    with serving(model, tmp_path) as (url, found), contextlib.ExitStack() as stack:
        answers = []

        def ask() -> None:
            body = {"input": "a pause b", "response_format": "pcm"}
            answers.append(httpx.post(url + "/v1/audio/speech", json=body))

        threads = [threading.Thread(target=ask) for _ in range(MOST + QUEUE)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        gate = found.server.gate
        wait_until(lambda: (gate.num_active, gate.num_waiting) == (MOST, QUEUE))
        assert model.num_open == MOST
        assert len(found.pins.pinned) == len(model.voices) + MOST  # those that wait pin nothing
        num_texts = model.num_texts
        refused = httpx.post(url + "/v1/audio/speech", json={"input": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "--max-audio-queue" in refused.json()["error"]["message"]
        assert model.num_texts == num_texts
        stack.close()
        assert [answer.status_code for answer in answers] == [200] * (MOST + QUEUE)


def test_who_leaves_the_queue_waits_no_more(tmp_path: Path) -> None:
    model = Tones(pause_s=3.0)
    with serving(model, tmp_path) as (url, found), contextlib.ExitStack() as stack:

        def ask(timeout_s: float) -> None:
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(url + "/v1/audio/speech", json={"input": "pause"}, timeout=timeout_s)

        gate = found.server.gate
        for i, timeout_s in enumerate([2.0] * MOST + [0.5] * QUEUE):
            thread = threading.Thread(target=ask, args=[timeout_s])
            thread.start()
            stack.callback(thread.join)
            wait_until(lambda i=i: gate.num_active + gate.num_waiting == i + 1)
        wait_until(lambda: gate.num_waiting == 0, timeout_s=1.0)
        assert gate.num_active == MOST
        assert model.num_opened == 1 + MOST  # and the word at the start


def test_who_does_not_read_loses_the_place(tmp_path: Path) -> None:
    model = Tones()
    with serving(model, tmp_path, speech_idle_s=0.4) as (url, found):
        body = json.dumps({"input": "forever" + " a" * 2000, "response_format": "pcm"})
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall((head + body).encode())
            gate = found.server.gate
            wait_until(lambda: gate.num_active == 1)
            wait_until(lambda: (gate.num_active, model.num_open) == (0, 0), timeout_s=10)
            data = b""
            while part := client.recv(1 << 16):
                data = data[-8:] + part
        assert not data.endswith(b"0\r\n\r\n")


def test_texts_keep_no_sound_waiting(tmp_path: Path) -> None:
    go_on = threading.Event()

    class Thinker(Tones):
        def utterances(self, text: str) -> list[list[int]]:
            if "think" in text:
                go_on.wait(20)
            return super().utterances(text)

    with serving(Thinker(chunk_s=0.01), tmp_path) as (url, _), contextlib.ExitStack() as stack:
        stack.callback(go_on.set)

        def ask(text: str) -> Any:
            body = {"input": text, "response_format": "pcm"}
            return httpx.stream("POST", url + "/v1/audio/speech", json=body, timeout=10)

        def think() -> None:
            with ask("think") as answer:
                answer.read()

        with ask("forever" + " a" * 1000) as answer:
            parts = answer.iter_raw()
            next(parts)
            for _ in range(6):
                thread = threading.Thread(target=think)
                thread.start()
                stack.callback(thread.join)
            stack.callback(go_on.set)
            time.sleep(0.3)
            for _ in range(100):
                next(parts)
            assert not go_on.is_set()


@pytest.mark.parametrize(("speed", "heard_s"), [(2.0, 0.25), (0.5, 1.0)])
def test_a_limit_is_of_what_is_heard(url: str, speed: float, heard_s: float) -> None:
    body = {"input": TEXT, "response_format": "pcm", "speed": speed}
    answer = httpx.post(url, json={**body, "max_duration_s": 1.1 * heard_s})
    assert abs(len(answer.content) / 2 / RATE - heard_s) < 0.1
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(url, json={**body, "max_duration_s": 0.8 * heard_s})


def test_instructions_are_taken_and_said_to_be_ignored(url: str) -> None:
    answer = httpx.post(url, json={"input": "a", "instructions": "Whisper."})
    assert answer.headers["x-ignored-fields"] == "instructions"


def test_a_model_of_text_says_so(tmp_path: Path) -> None:
    with serving(None, tmp_path) as (url, _):
        for path, method in [
            ("speech", "POST"),
            ("voices", "GET"),
            ("voices", "POST"),
            ("voices/a", "DELETE"),
        ]:
            body = {"json": {"input": "a"}} if method == "POST" else {}
            answer = httpx.request(method, f"{url}/v1/audio/{path}", **body)
            assert answer.status_code == 404
            assert "no speech profile" in answer.json()["error"]["message"]


def wav(seconds: float = 2.0, level: float = 0.2) -> bytes:
    from bounded_kv_server.wav_header import wav_header

    pcm = to_pcm(level * np.sin(np.arange(int(seconds * RATE)) / 20).astype("f4"))
    return wav_header(RATE, len(pcm)) + pcm


def upload(url: str, **given: Any) -> httpx.Response:
    form = {"name": "mine", "consent": "true", **given}
    sample = form.pop("audio_sample", wav())
    files: Any = {"audio_sample": (None, "text") if sample is None else ("a.wav", sample)}
    return httpx.post(url, data=form, files=files, timeout=30)


def test_voices_come_and_go(server: tuple[str, Any], url: str) -> None:
    voices = server[0] + "/v1/audio/voices"
    made = upload(voices)
    assert made.status_code == 201, made.text
    names = [voice["name"] for voice in httpx.get(voices).json()["data"]]
    assert names == ["low", "high", "mine"]
    said = {"input": TEXT, "response_format": "pcm", "voice": "mine"}
    first = httpx.post(url, json=said).content
    assert first != httpx.post(url, json={**said, "voice": "low"}).content
    other = upload(voices, audio_sample=wav(level=0.4))
    assert other.json()["id"] != made.json()["id"]
    assert httpx.post(url, json=said).content != first
    held = server[1].pins.pinned[-1]
    assert httpx.delete(f"{voices}/mine").json()["deleted"]
    assert held not in server[1].pins.pinned
    assert httpx.delete(f"{voices}/mine").status_code == 404
    assert httpx.post(url, json=said).status_code == 404


@pytest.mark.parametrize(
    ("given", "status", "field"),
    [
        ({"name": "../mine"}, 400, "name"),
        ({"name": ""}, 400, "name"),
        ({"name": "low"}, 409, "name"),
        ({"consent": "no"}, 400, "consent"),
        ({"audio_sample": None}, 400, "audio_sample"),
        ({"audio_sample": b"nothing"}, 400, "audio_sample"),
        ({"audio_sample": wav(level=0.0)}, 400, "audio_sample"),
        ({"audio_sample": wav(seconds=0.2)}, 400, "audio_sample"),
        ({"audio_sample": b"\0" * 11_000_000}, 413, "audio_sample"),
        ({"colour": "red"}, 400, "colour"),
    ],
)
def test_a_bad_upload_is_named(
    server: tuple[str, Any], given: dict[str, Any], status: int, field: str
) -> None:
    answer = upload(server[0] + "/v1/audio/voices", **given)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == field


def test_a_voice_is_of_its_codec_alone(tmp_path: Path) -> None:
    other = Tones()
    other.voice_kind = "others"
    for model, names in [(Tones(), ["low", "high"]), (other, ["low", "high"])]:
        with serving(model, tmp_path) as (url, _):
            voices = url + "/v1/audio/voices"
            assert [voice["name"] for voice in httpx.get(voices).json()["data"]] == names
            assert upload(voices).status_code == 201


@pytest.mark.parametrize(("given", "status"), [({"name": "../mine"}, 400), ({}, 409)])
def test_what_cannot_be_kept_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], status: int
) -> None:
    async def decode(data: bytes) -> None:
        raise AssertionError

    monkeypatch.setattr(server_voices, "read_sample_safely", decode)
    with serving(Tones(), tmp_path, max_voices=0) as (url, _):
        answer = upload(url + "/v1/audio/voices", **given)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "name")


def test_few_uploads_are_read_at_once_and_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "AT_ONCE", 2)
    monkeypatch.setattr(uploads, "READ_S", 3.0)

    def slowly() -> Iterator[bytes]:
        yield b"--a\r\n"
        for _ in range(100):
            time.sleep(0.1)
            yield b""
        yield b"--a--\r\n"

    answers = []

    def send(url: str) -> None:
        headers = {"Content-Type": "multipart/form-data; boundary=a"}
        answers.append(httpx.post(url, content=slowly(), headers=headers, timeout=10))

    with serving(Tones(), tmp_path) as (url, found), contextlib.ExitStack() as stack:
        voices = url + "/v1/audio/voices"
        for _ in range(2):
            thread = threading.Thread(target=send, args=[voices])
            thread.start()
            stack.callback(thread.join)
        wait_until(lambda: found.server.uploads.num_open == 2)
        refused = upload(voices)
        assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (503, True)
        wait_until(lambda: found.server.uploads.num_open == 0)
        assert upload(voices).status_code == 201
        stack.close()
        assert [answer.status_code for answer in answers] == [408, 408]
