"""The socket, over a real one, in front of tones instead of an engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from support.speech_server import serving, wait_until
from support.tones import CHUNK, RATE, Tones

WORD = RATE // 10
PATIENCE_S = 60.0
"""For a machine that has other things to do."""
TOO_MUCH = json.dumps({"type": "input.text", "text": "a. " * 5000})


@pytest.fixture(scope="module")
def model() -> Tones:
    return Tones()


@pytest.fixture(scope="module")
def server(model: Tones, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    with serving(model, tmp_path_factory.mktemp("voices")) as found:
        yield found


def talk(url: str, **config: Any) -> ClientConnection:
    """A socket that has said how it wants things said."""
    socket = connect(url.replace("http", "ws") + "/v1/audio/speech/stream")
    say(socket, "session.config", **config)
    return socket


def say(socket: ClientConnection, kind: str, **values: Any) -> None:
    socket.send(json.dumps({"type": kind, **values}))


def listen(socket: ClientConnection, until: str) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Samples and messages, up to the message of that type."""
    sound, told = b"", []
    while True:
        message = socket.recv(timeout=PATIENCE_S)
        if isinstance(message, bytes):
            sound += message
            continue
        told.append(json.loads(message))
        if told[-1]["type"] == until:
            return np.frombuffer(sound, "<i2"), told
        assert told[-1]["type"] != "error", told[-1]


def test_text_in_pieces_is_said_in_order_in_one_stream(
    server: tuple[str, Any], model: Tones
) -> None:
    before = model.num_opened
    with talk(server[0], voice="high") as socket:
        ready = listen(socket, "session.ready")[1][-1]
        assert (ready["rate"], ready["format"]) == (RATE, "pcm")
        for piece in ("On", "e two. Thr", "ee four five", ". Six"):
            say(socket, "input.text", text=piece)
        first, _ = listen_samples(socket, 5 * WORD)
        say(socket, "input.done")
        rest, _ = listen(socket, "speech.done")
        say(socket, "input.text", text="Seven.")
        say(socket, "session.close")
        last, _ = listen(socket, "session.closed")
    whole = np.concatenate([first, rest, last])
    assert len(whole) == 7 * WORD
    pitch = 100.0 + sum(model.voices["high"])
    expected = 0.2 * np.sin(2 * np.pi * pitch * np.arange(7 * WORD) / RATE)
    assert np.abs(whole / 32767 - expected).max() < 1e-3
    assert model.num_opened == before + 1
    wait_until(lambda: model.num_open == 0, PATIENCE_S)


def listen_samples(socket: ClientConnection, count: int) -> tuple[np.ndarray, list[Any]]:
    sound = b""
    while len(sound) < 2 * count:
        message = socket.recv(timeout=PATIENCE_S)
        assert isinstance(message, bytes), message
        sound += message
    return np.frombuffer(sound, "<i2"), []


def test_who_barges_in_is_heard(server: tuple[str, Any], model: Tones) -> None:
    with talk(server[0]) as socket:
        listen(socket, "session.ready")
        say(socket, "input.text", text="forever. never said. ")
        listen_samples(socket, WORD)
        say(socket, "input.clear")
        listen(socket, "input.cleared")
        with pytest.raises(TimeoutError):
            socket.recv(timeout=0.2)
        say(socket, "input.text", text="Two words.")
        say(socket, "input.done")
        sound, _ = listen(socket, "speech.done")
        # What was in the encoder goes before.
        assert 2 * WORD <= len(sound) <= 2 * WORD + CHUNK
        say(socket, "session.close")
        listen(socket, "session.closed")
    wait_until(lambda: model.num_open == 0, PATIENCE_S)


@pytest.mark.parametrize("format", ["opus", "mp3", "wav"])
def test_one_encoder_a_socket(server: tuple[str, Any], format: str) -> None:
    with talk(server[0], response_format=format) as socket:
        say(socket, "input.text", text="One two three four five six. ")
        say(socket, "input.clear")
        say(socket, "input.text", text="One two three four five six. ")
        say(socket, "session.close")
        data = b""
        while not (
            isinstance(message := socket.recv(timeout=PATIENCE_S), str) and "closed" in message
        ):
            data += message if isinstance(message, bytes) else b""
    assert data.count({"opus": b"OpusHead", "wav": b"RIFF", "mp3": b"ID3"}[format]) == 1


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        (["nonsense"], "JSON"),
        ([b"\0"], "JSON"),
        (['{"type": "input.text", "text": "a"}'], "session.config"),
        (['{"type": "session.config", "voice": "nobody"}'], "nobody"),
        (['{"type": "session.config", "model": "another"}'], "another"),
        (['{"type": "session.config", "speed": 9}'], "speed"),
        (['{"type": "session.config"}', '{"type": "session.config"}'], "session.config"),
        (['{"type": "session.config"}', '{"type": "input.audio"}'], "input.audio"),
        (['{"type": "session.config"}', '{"type": "input.text"}'], "text"),
        (
            ['{"type": "session.config"}', TOO_MUCH],
            "--max-speech-input",
        ),
        (['{"type": "session.config"}', '{"type": "input.text", "text": "a fail. "}'], "failed"),
    ],
)
def test_what_will_not_do_is_named_and_ends_the_socket(
    server: tuple[str, Any], model: Tones, messages: list[str | bytes], named: str
) -> None:
    with connect(server[0].replace("http", "ws") + "/v1/audio/speech/stream") as socket:
        for message in messages:
            socket.send(message)
        told = []
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                told.append(socket.recv(timeout=PATIENCE_S))
        error = json.loads(told[-1])
        assert error["type"] == "error"
        assert named in error["error"]["message"]
        assert closed.value.rcvd is not None and closed.value.rcvd.code in (1008, 1011)
    wait_until(lambda: model.num_open == 0, PATIENCE_S)


@pytest.mark.parametrize(
    ("messages", "named"),
    [([], "no message for 0.3 s"), (['{"type": "session.config"}'], "no text or sound for 0.3 s")],
)
def test_who_says_nothing_is_idle(tmp_path: Path, messages: list[str], named: str) -> None:
    with (
        serving(Tones(), tmp_path, speech_idle_s=0.3) as (url, _),
        connect(url.replace("http", "ws") + "/v1/audio/speech/stream") as socket,
    ):
        for message in messages:
            with contextlib.suppress(ConnectionClosed):  # a slow machine is idle before it
                socket.send(message)
        told = []
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                told.append(socket.recv(timeout=PATIENCE_S))
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        found = json.loads(told[-1])["error"]["message"]
        assert "for 0.3 s (--speech-idle-s)" in found
        assert named in found or len(told) == 1


def test_who_leaves_frees_the_place(server: tuple[str, Any], model: Tones) -> None:
    for _ in range(10):
        socket = talk(server[0])
        say(socket, "input.text", text="forever. ")
        listen(socket, "session.ready")
        socket.close()
    wait_until(lambda: model.num_open == 0, PATIENCE_S)
    wait_until(lambda: server[1].server.gate.num_active == 0, PATIENCE_S)


def test_a_model_of_text_says_so(tmp_path: Path) -> None:
    with serving(None, tmp_path) as (url, _):
        socket = connect(url.replace("http", "ws") + "/v1/audio/speech/stream")
        with socket:
            error = json.loads(socket.recv(timeout=PATIENCE_S))
            assert "no speech profile" in error["error"]["message"]
