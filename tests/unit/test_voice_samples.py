"""Samples of voices: files of any kind, and what must not come of them."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from bounded_kv_server import sample_decoder
from bounded_kv_server.encoding import encode_all
from bounded_kv_server.sample import read_sample_safely
from bounded_kv_server.sample_decoder import (
    LONGEST_S,
    MAX_BYTES,
    SAMPLE_RATE,
    SampleError,
    read_sample,
)
from bounded_kv_speech.frames import Floats

# muxer and codec
WAV, FLOAT_WAV, M4A = ("wav", "pcm_s16le"), ("wav", "pcm_f32le"), ("mp4", "aac")
KINDS = {
    "wav": WAV,
    "mp3": ("mp3", "libmp3lame"),
    "flac": ("flac", "flac"),
    "ogg": ("ogg", "libopus"),
    "m4a": M4A,
    "webm": ("webm", "libopus"),
    "aac": ("adts", "aac"),
    "aiff": ("aiff", "pcm_s16be"),
    "caf": ("caf", "pcm_s16le"),
}


def tone(seconds: float, rate: int, hz: float = 440.0) -> Floats:
    time = np.arange(round(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * hz * time)).astype(np.float32)


def made(
    kind: tuple[str, str], channels: NDArray[Any], rate: int, with_picture: bool = False
) -> bytes:
    """A file of `channels [C, N]`."""
    muxer, codec = kind
    layout = {1: "mono", 2: "stereo"}[len(channels)]
    data = io.BytesIO()
    with av.open(data, "w", muxer) as file:
        if with_picture:
            pictures = file.add_stream("mjpeg", 1, width=64, height=64, pix_fmt="yuvj420p")
        stream = file.add_stream(codec, rate, layout=layout)
        if with_picture:
            picture = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), "rgb24")
            file.mux(pictures.encode(picture) + pictures.encode(None))
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channels), "fltp", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return data.getvalue()


def read(data: bytes, **kwargs: Any) -> Floats:
    return asyncio.run(read_sample_safely(data, **kwargs))


def pitch(samples: Floats) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax() * SAMPLE_RATE / len(samples))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    before = psutil.Process().children()
    yield
    assert psutil.Process().children() == before


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read(kind: str) -> None:
    samples = read(made(KINDS[kind], tone(2.0, SAMPLE_RATE)[None], SAMPLE_RATE))
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert len(samples) / SAMPLE_RATE == pytest.approx(2.0, abs=0.1)
    assert pitch(samples) == pytest.approx(440.0, abs=2.0)
    assert np.sqrt(np.square(samples).mean()) == pytest.approx(0.4 / 2**0.5, rel=0.05)


def test_a_wav_file_of_our_rate_is_read_exactly() -> None:
    wanted = tone(1.5, SAMPLE_RATE)
    assert np.abs(read(encode_all(wanted, "wav", SAMPLE_RATE)) - wanted).max() < 2 / 32768


@pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "m4a"])
def test_channels_are_mixed_and_rates_are_changed(kind: str) -> None:
    """Two that are the same make one of the same level, and opposite ones silence."""
    one = tone(2.0, 44_100)
    samples = read(made(KINDS[kind], np.stack([one, one]), 44_100))
    assert len(samples) / SAMPLE_RATE == pytest.approx(2.0, abs=0.1)
    assert pitch(samples) == pytest.approx(440.0, abs=2.0)
    assert np.abs(samples[2400:-4800]).max() == pytest.approx(0.4, abs=0.02)
    silence = read_sample(made(KINDS[kind], np.stack([one, -one]), 44_100))
    assert np.abs(silence).max() < 0.01


def test_a_picture_beside_the_sound_does_no_harm() -> None:
    data = made(M4A, tone(2.0, SAMPLE_RATE)[None], SAMPLE_RATE, with_picture=True)
    assert pitch(read(data)) == pytest.approx(440.0, abs=2.0)


def test_a_title_may_be_in_any_alphabet() -> None:
    data = encode_all(tone(2.0, SAMPLE_RATE), "wav", SAMPLE_RATE)
    title = b"LIST\x10\0\0\0INFOINAM\x04\0\0\0caf\xe9"  # Latin-1
    data = data[:36] + title + data[36:]
    assert len(read(data)) == 2 * SAMPLE_RATE


def test_a_second_is_enough_at_any_rate() -> None:
    for rate in (8_000, 44_100):
        assert len(read_sample(made(WAV, tone(1.0, rate)[None], rate))) == SAMPLE_RATE


def test_sound_beyond_full_scale_is_cut() -> None:
    loud = read_sample(made(FLOAT_WAV, 1e30 * tone(1.0, SAMPLE_RATE)[None], SAMPLE_RATE))
    assert np.abs(loud).max() == 1.0


@pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "ogg", "aac"])
def test_a_file_that_is_cut_off_is_read_until_there(kind: str) -> None:
    # A page of Ogg is a second long.
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, 6 * SAMPLE_RATE).astype(np.float32)
    data = made(KINDS[kind], noise[None], SAMPLE_RATE)
    assert len(read(data[: len(data) // 2 + 1])) / SAMPLE_RATE == pytest.approx(3.0, abs=1.1)


def test_of_a_long_file_only_the_beginning_is_used() -> None:
    rate = 8_000
    samples = read(encode_all(tone(600.0, rate), "wav", rate))
    assert len(samples) == LONGEST_S * SAMPLE_RATE
    assert pitch(samples) == pytest.approx(440.0, abs=1.0)


def test_what_comes_after_the_part_that_is_used_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FFmpeg would read all of the file's bytes."""
    rate = 48_000
    data = encode_all(tone(90.0, rate), "wav", rate)
    files: list[io.BytesIO] = []

    class Watched(io.BytesIO):
        def __init__(self, content: bytes = b"") -> None:
            super().__init__(content)
            files.append(self)

        def close(self) -> None:  # so that it can be asked where it was
            pass

    monkeypatch.setattr(sample_decoder.io, "BytesIO", Watched)
    read_sample(data)
    assert files[0].tell() < len(data) * 0.4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes(MAX_BYTES + 1), "has 10485761 bytes; it may have 10485760 at most"),
        (b"", "cannot be read"),
        (b"RIFF", "cannot be read"),
        (np.random.default_rng(1).bytes(50_000), "cannot be read"),
        (made(M4A, tone(2.0, SAMPLE_RATE)[None], SAMPLE_RATE)[:-500], "cannot be read"),
        (encode_all(tone(0.5, SAMPLE_RATE), "wav", SAMPLE_RATE), "is 0.50 s long; .* 1 s at least"),
        (encode_all(tone(0.0, SAMPLE_RATE), "wav", SAMPLE_RATE), "is 0.00 s long"),
        (
            made(FLOAT_WAV, np.full((1, SAMPLE_RATE), np.nan, np.float32), SAMPLE_RATE),
            "values that are no numbers",
        ),
    ],
    ids=["large", "empty", "start", "noise", "no-index", "short", "silent", "nan"],
)
def test_what_is_wrong_is_said(data: bytes, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        read(data)


def test_a_film_without_sound_has_none() -> None:
    data = io.BytesIO()
    with av.open(data, "w", "mp4") as file:
        stream = file.add_stream("mjpeg", 1, width=64, height=64, pix_fmt="yuvj420p")
        picture = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), "rgb24")
        file.mux(stream.encode(picture) + stream.encode(None))
    with pytest.raises(SampleError, match="has no sound in it"):
        read(data.getvalue())


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{url}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{path}'\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static">'
    '<Period><AdaptationSet mimeType="audio/mp4"><Representation id="1" bandwidth="1">'
    "<BaseURL>{url}</BaseURL></Representation></AdaptationSet></Period></MPD>",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n",
}


@pytest.mark.parametrize("kind", PLAYLISTS)
def test_no_other_file_is_read(kind: str, tmp_path: Path) -> None:
    """Not even in this process, whose files are not limited, and though it could be played."""
    other = tmp_path / "other.aac"
    other.write_bytes(encode_all(tone(2.0, SAMPLE_RATE), "aac", SAMPLE_RATE))
    playlist = PLAYLISTS[kind].format(url=other.as_uri(), path=other).encode()
    with pytest.raises(SampleError, match="cannot be read"):
        read_sample(playlist)
    with pytest.raises(SampleError, match="cannot be read"):
        read(playlist)


def test_other_kinds_of_file_are_refused() -> None:
    data = made(("au", "pcm_s16be"), tone(2.0, SAMPLE_RATE)[None], SAMPLE_RATE)
    with av.open(io.BytesIO(data)) as file:
        assert file.format.name == "au"
    with pytest.raises(SampleError, match="must be a file of sound: wav, mp3, flac"):
        read(data)


def test_the_decoder_can_open_nothing_and_has_little_memory() -> None:
    script = """
import socket
from bounded_kv_server.sample_decoder import MEMORY_BYTES, limit_this_process

limit_this_process()
for what in (lambda: open("/etc/passwd"), socket.socket, lambda: bytearray(MEMORY_BYTES)):
    try:
        print(what())
    except (OSError, MemoryError) as error:
        print(type(error).__name__, getattr(error, "errno", None))
"""
    root = Path(sample_decoder.__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    output = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.splitlines() == ["OSError 24", "OSError 24", "MemoryError None"]


def test_the_decoder_sees_none_of_our_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a secret")

    async def look() -> bytes:
        reading = asyncio.create_task(read_sample_safely(a_sample()))
        child = await child_of_ours()
        environment = Path(f"/proc/{child.pid}/environ").read_bytes()
        await reading
        return environment

    environment = asyncio.run(look())
    assert b"MALLOC_ARENA_MAX" in environment
    assert b"a secret" not in environment


def a_sample() -> bytes:
    return encode_all(tone(2.0, SAMPLE_RATE), "wav", SAMPLE_RATE)


async def child_of_ours() -> psutil.Process:
    """The decoder, when it runs Python."""
    while True:
        for child in psutil.Process().children():
            if any("sample_decoder" in argument for argument in child.cmdline()):
                return child
        await asyncio.sleep(0.001)


def test_a_decoder_that_takes_too_long_is_ended() -> None:
    with pytest.raises(SampleError, match=r"was not decoded after 0.01 s"):
        read(a_sample(), timeout_s=0.01)
    assert psutil.Process().children() == []


def test_a_decoder_that_nobody_waits_for_is_ended() -> None:
    async def leave() -> None:
        reading = asyncio.create_task(read_sample_safely(a_sample()))
        await child_of_ours()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert psutil.Process().children() == []

    asyncio.run(leave())


def test_a_decoder_that_dies_is_an_error_of_the_sample() -> None:
    async def kill() -> None:
        reading = asyncio.create_task(read_sample_safely(a_sample()))
        os.kill((await child_of_ours()).pid, signal.SIGKILL)
        with pytest.raises(SampleError, match="its decoder ended with -9"):
            await reading

    asyncio.run(kill())
