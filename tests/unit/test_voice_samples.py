"""Samples of voices: what is read of them, and what cannot hurt."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import av
import numpy as np
import psutil
import pytest

from bounded_kv_server.encoding import encode_all
from bounded_kv_server.sample import MAX_BYTES, SampleError, decode, read_sample_safely

RATE = 24_000


def tone(seconds: float, rate: int = RATE) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * 220 * np.arange(int(seconds * rate)) / rate)).astype("f4")


def muxed(samples: np.ndarray, rate: int, container: str, codec: str, layout: str) -> bytes:
    data = io.BytesIO()
    with av.open(data, "w", container) as file:
        stream: Any = file.add_stream(codec, rate, layout=layout)
        channels = 2 if layout == "stereo" else 1
        planes = np.repeat((samples * 32767).astype("<i2")[:, None], channels, 1)
        frame = av.AudioFrame.from_ndarray(planes.reshape(1, -1), "s16", layout)
        frame.sample_rate, frame.pts = rate, 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return data.getvalue()


def pitch(samples: np.ndarray) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * RATE / len(samples))


@pytest.mark.parametrize("format", ["wav", "mp3", "opus", "flac", "aac"])
def test_formats(format: str) -> None:
    samples = decode(encode_all(tone(2), format, RATE))
    assert abs(len(samples) / RATE - 2) < 0.1
    assert pitch(samples) == pytest.approx(220, abs=2)


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "aac"), ("matroska", "flac"), ("wav", "pcm_s16le")]
)
def test_rates_and_channels(container: str, codec: str) -> None:
    samples = decode(muxed(tone(2, 44_100), 44_100, container, codec, "stereo"))
    assert abs(len(samples) / RATE - 2) < 0.1
    assert pitch(samples) == pytest.approx(220, abs=2)


def read(data: bytes, **options: Any) -> np.ndarray:
    return asyncio.run(read_sample_safely(data, **options))


def test_in_a_process_of_its_own_it_is_the_same() -> None:
    data = encode_all(tone(2), "flac", RATE)
    assert np.array_equal(read(data), decode(data))


def test_what_is_too_long_is_used_up_to_a_limit() -> None:
    assert len(read(encode_all(tone(100), "opus", RATE))) == 30 * RATE


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "known format"),
        (b"nothing", "known format"),
        (np.random.default_rng(0).bytes(50_000), "known|no sound"),
        (b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n", "known format"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "known format"),
        (b"\0" * (MAX_BYTES + 1), str(MAX_BYTES)),
        (encode_all(tone(0.5), "wav", RATE), "0.50 s"),
        (encode_all(tone(2), "mp3", RATE)[:300], "s of sound|known|no sound"),
    ],
)
def test_what_will_not_do_is_named(data: bytes, named: str) -> None:
    with pytest.raises(SampleError, match=named):
        read(data)


def test_what_takes_too_long_is_ended() -> None:
    before = len(psutil.Process().children())
    with pytest.raises(SampleError, match="within"):
        read(encode_all(tone(2), "wav", RATE), timeout_s=0.01)
    assert len(psutil.Process().children()) == before


def test_one_cut_off_is_used_as_far_as_it_goes() -> None:
    data = encode_all(tone(4), "mp3", RATE)
    assert 1.5 < len(read(data[: len(data) // 2])) / RATE < 2.5
