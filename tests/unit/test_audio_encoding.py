"""Sound in six formats, however it is fed."""

from __future__ import annotations

import io

import av
import numpy as np
import psutil
import pytest

from bounded_kv_server.encoding import FORMATS, Encoder, content_type, encode_all
from bounded_kv_speech.wav import to_pcm
from support.sounds import samples_of

RATE = 24_000
SECONDS = 1.7
LOSSLESS = ("pcm", "wav", "flac")


@pytest.fixture(scope="module")
def sound() -> np.ndarray:
    times = np.arange(int(SECONDS * RATE)) / RATE
    return (0.4 * np.sin(2 * np.pi * 220 * times * (1 + 0.1 * times))).astype(np.float32)


def encoded(sound: np.ndarray, format: str, sizes: list[int], speed: float = 1.0) -> bytes:
    """In parts of these sizes, in turn."""
    with Encoder(format, RATE, speed) as encoder:
        data, at, i = b"", 0, 0
        while at < len(sound):
            data += encoder.encode(sound[at : at + sizes[i % len(sizes)]])
            at += sizes[i % len(sizes)]
            i += 1
        return data + encoder.finish()


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.0, 1.3, 4.0])
@pytest.mark.parametrize("format", FORMATS)
def test_it_lasts_as_long_as_it_must(sound: np.ndarray, format: str, speed: float) -> None:
    found = samples_of(encoded(sound, format, [600], speed), format)
    assert abs(len(found) / RATE - SECONDS / speed) < 0.1
    assert np.abs(found).max() > 8000


@pytest.mark.parametrize("format", LOSSLESS)
def test_lossless_formats_are_the_samples(sound: np.ndarray, format: str) -> None:
    found = samples_of(encoded(sound, format, [600]), format)
    assert found.tobytes() == to_pcm(sound)


@pytest.mark.parametrize("format", FORMATS)
def test_parts_do_not_matter(sound: np.ndarray, format: str) -> None:
    whole = samples_of(encoded(sound, format, [len(sound)]), format)
    parts = samples_of(encoded(sound, format, [1, 599, 600, 4801]), format)
    assert np.array_equal(whole, parts)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_cut_off_is_still_one(sound: np.ndarray, format: str) -> None:
    data = encoded(sound, format, [600])
    if format == "pcm":
        return
    found = 0
    with av.open(io.BytesIO(data[: len(data) // 2])) as file:
        try:
            for frame in file.decode(audio=0):
                found += frame.samples
        except av.FFmpegError:
            pass  # its last frame is half a frame
    assert found > 0.3 * SECONDS * RATE


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_come_soon(sound: np.ndarray, format: str) -> None:
    with Encoder(format, RATE) as encoder:
        soon = b"".join(encoder.encode(sound[at : at + 600]) for at in range(0, RATE // 2, 600))
    assert len(soon) > 1000


@pytest.mark.parametrize("format", FORMATS)
def test_whole_samples_and_one_header(sound: np.ndarray, format: str) -> None:
    with Encoder(format, RATE) as encoder:
        parts = [encoder.encode(sound[at : at + 601]) for at in range(0, 6010, 601)]
    if format in ("pcm", "wav"):
        assert all(len(part) % 2 == 0 for part in parts)
    assert sum(part.count(b"RIFF") for part in parts) == (format == "wav")


def test_a_file_whose_end_is_known_says_its_size(sound: np.ndarray) -> None:
    data = encode_all(sound, "wav", RATE)
    assert int.from_bytes(data[4:8], "little") == len(data) - 8
    streamed = encoded(sound, "wav", [600])
    assert streamed[4:8] == streamed[40:44] == b"\xff" * 4


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("ogg", RATE, 1.0), "ogg"),
        (("mp3", 4000, 1.0), "4000"),
        (("mp3", 96_000, 1.0), "96000"),
        (("mp3", RATE, 0.2), "0.2"),
        (("mp3", RATE, 5.0), "5.0"),
    ],
)
def test_what_cannot_be_had_is_named(given: tuple[str, int, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Encoder(*given)


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("format", FORMATS)
def test_other_rates(format: str, rate: int) -> None:
    data = encode_all(np.zeros(rate, np.float32), format, rate)
    if format == "pcm":
        assert content_type(format, rate) == f"audio/pcm;rate={rate};channels=1"
        return
    with av.open(io.BytesIO(data)) as file:
        frames = list(file.decode(audio=0))
    assert abs(sum(f.samples for f in frames) / frames[0].sample_rate - 1) < 0.3


def test_who_stops_early_leaves_nothing(sound: np.ndarray) -> None:
    process = psutil.Process()
    for format in FORMATS:
        Encoder(format, RATE, 1.5).close()
    before = process.num_fds(), process.num_threads()
    for i in range(60):
        encoder = Encoder(FORMATS[i % 6], RATE, 1.5)
        encoder.encode(sound[:6000])
        encoder.close()
        encoder.close()
    assert (process.num_fds(), process.num_threads()) == before
