"""What an encoder holds back comes out when there is nothing more to say for now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bounded_kv_server.encoding import FORMATS, Encoder
from support.sounds import samples_of
from support.speech_line import run, speech_server, talking
from support.tones import CHUNK, RATE, WORD_CHUNKS, Tones

SPEEDS = (0.25, 0.5, 1.0, 1.5, 4.0)
DELAY_S = {"mp3": 0.047, "aac": 0.044}
"""Silence that a decoder finds before the sound."""


def heard_s(data: bytes, format: str) -> float:
    return len(samples_of(data, format)) / RATE - DELAY_S.get(format, 0.0)


def tone(count: int) -> Any:
    return (0.3 * np.sin(0.1 * np.arange(count))).astype("f4")


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("format", FORMATS)
def test_it_holds_nothing_back_then(format: str, speed: float) -> None:
    for count in range(RATE, RATE + 4000, 900):
        with Encoder(format, RATE, speed) as encoder:
            sound = tone(count)
            parts = [encoder.encode(sound[at : at + CHUNK]) for at in range(0, count, CHUNK)]
            parts.append(encoder.settle())
            assert heard_s(b"".join(parts), format) >= count / RATE / speed
            parts += [encoder.encode(sound), encoder.finish()]
        assert heard_s(b"".join(parts), format) >= 2 * count / RATE / speed


@pytest.mark.parametrize("format", ["pcm", "wav"])
def test_where_nothing_is_held_nothing_is_added(format: str) -> None:
    with Encoder(format, RATE) as encoder:
        encoder.encode(tone(CHUNK))
        assert encoder.settle() == b""


@pytest.mark.parametrize("format", ["pcm", "flac", "mp3"])
def test_all_has_been_sent_when_speech_is_done(tmp_path: Path, format: str) -> None:
    async def test() -> None:
        server = speech_server(Tones(chunk_s=0.01), tmp_path)
        async with talking(server, response_format=format) as (line, _):
            line.say("input.text", text="Some words. More words.")
            line.say("input.done")
            await line.hear("speech.done")
            said_s = 4 * WORD_CHUNKS * CHUNK / RATE
            found_s = heard_s(b"".join(line.sound), format)
            assert said_s <= found_s + 1e-9 and found_s < said_s + 0.2

    run(test())
