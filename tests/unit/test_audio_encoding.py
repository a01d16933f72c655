"""The speech server's formats: one file a response, whatever the chunks, at any speed, at once."""

from __future__ import annotations

import gc
import io
import os
from pathlib import Path

import av
import numpy as np
import psutil
import pytest

from bounded_kv_server.encoding import FORMATS, Encoder, content_type, encode_all
from bounded_kv_server.wav_header import wav_header
from bounded_kv_speech.frames import Floats
from bounded_kv_speech.wav import to_pcm

RATE = 24_000
EXACT = ("flac", "wav", "pcm")
FILES = tuple(name for name in FORMATS if name != "pcm")
HEADER = len(wav_header(RATE))
TOLERANCE_S = 0.1
"""Codecs fill up their first and last frame."""


def tone(seconds: float, rate: int = RATE, hz: float = 330.0) -> Floats:
    """A tone with something in it to tell its parts apart: it gets louder."""
    time = np.arange(round(seconds * rate)) / rate
    return (0.6 * time / seconds * np.sin(2 * np.pi * hz * time)).astype(np.float32)


def streamed(
    samples: Floats, format: str, chunk: int, rate: int = RATE, speed: float = 1.0
) -> bytes:
    with Encoder(format, rate, speed) as encoder:
        parts = [
            encoder.encode(samples[start : start + chunk])
            for start in range(0, len(samples), chunk)
        ]
        return b"".join(parts) + encoder.finish()


def decoded(data: bytes, format: str, rate: int = RATE) -> tuple[int, Floats]:
    """Rate, and samples `[N]`, as FFmpeg reads them."""
    options = {"sample_rate": str(rate), "ch_layout": "mono"} if format == "pcm" else {}
    with av.open(
        io.BytesIO(data), format="s16le" if format == "pcm" else None, container_options=options
    ) as file:
        frames = [frame.to_ndarray().reshape(-1) for frame in file.decode(audio=0)]
        samples = np.concatenate(frames)
        if samples.dtype == np.int16:
            samples = samples / np.float32(32768)
        return file.streams.audio[0].rate, np.asarray(samples, np.float32)


def pitch(samples: Floats, rate: int) -> float:
    """The loudest frequency, in Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax() * rate / len(samples))


@pytest.mark.parametrize("speed", [0.25, 0.4, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("format", FORMATS)
def test_a_response_has_the_duration_and_pitch_that_it_must(format: str, speed: float) -> None:
    rate, heard = decoded(streamed(tone(2.0), format, 600, speed=speed), format)
    assert len(heard) / rate == pytest.approx(2.0 / speed, abs=TOLERANCE_S)
    assert pitch(heard, rate) == pytest.approx(330.0, abs=5.0)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 37_000, 44_100, 48_000])
@pytest.mark.parametrize("format", FORMATS)
def test_sound_may_have_any_rate(format: str, rate: int) -> None:
    """Each codec takes few of them."""
    seconds = 2.0
    heard_rate, heard = decoded(streamed(tone(seconds, rate), format, 999, rate), format, rate)
    assert heard_rate >= rate
    padding = 2 * 1152 / rate  # two frames of mp3 are longer at low rates
    assert len(heard) / heard_rate == pytest.approx(seconds, abs=padding + 0.01)
    assert pitch(heard, heard_rate) == pytest.approx(330.0, abs=5.0)


@pytest.mark.parametrize("format", EXACT)
def test_formats_without_loss_hold_the_very_samples(format: str) -> None:
    loud = tone(1.0) * 4.0  # beyond full scale it is cut, not wrapped
    _, heard = decoded(streamed(loud, format, 600), format)
    assert (heard * 32768).astype("<i2").tobytes() == to_pcm(loud)


@pytest.mark.parametrize("speed", [1.0, 1.7])
@pytest.mark.parametrize("format", FORMATS)
def test_chunks_make_no_difference(format: str, speed: float) -> None:
    samples = tone(1.3)
    whole = streamed(samples, format, len(samples), speed=speed)
    for chunk in (441, 600, 4_800):
        data = streamed(samples, format, chunk, speed=speed)
        assert np.array_equal(decoded(data, format)[1], decoded(whole, format)[1])
        if format in ("pcm", "wav"):
            assert data == whole


@pytest.mark.parametrize("speed", [1.0, 1.3])
@pytest.mark.parametrize("format", ["pcm", "wav"])
def test_chunks_hold_whole_samples_and_one_header(format: str, speed: float) -> None:
    with Encoder(format, RATE, speed) as encoder:
        parts = [encoder.encode(tone(0.3)[:601]) for _ in range(20)] + [encoder.finish()]
    assert all(len(part) % 2 == 0 for part in parts)
    assert b"".join(parts).count(b"RIFF") == (format == "wav")
    if format == "wav":
        first = next(part for part in parts if part)
        assert first[:HEADER] == wav_header(RATE)
        assert len(first) > HEADER


def test_the_header_of_a_wav_file_tells_its_size_if_that_is_known() -> None:
    samples = tone(0.5)
    data = encode_all(samples, "wav", RATE)
    assert int.from_bytes(data[4:8], "little") == len(data) - 8
    assert int.from_bytes(data[40:44], "little") == len(data) - HEADER == 2 * len(samples)
    assert data[HEADER:] == to_pcm(samples)
    unknown = streamed(samples, "wav", 600)
    assert unknown[4:8] == unknown[40:44] == b"\xff\xff\xff\xff"
    assert wav_header(RATE, 5 << 30)[40:44] == b"\xff\xff\xff\xff"


@pytest.mark.parametrize("format", FORMATS)
def test_a_whole_response_sounds_as_a_streamed_one(format: str) -> None:
    samples = tone(0.7)
    one, other = encode_all(samples, format, RATE, 1.2), streamed(samples, format, 600, speed=1.2)
    assert np.array_equal(decoded(one, format)[1], decoded(other, format)[1])


@pytest.mark.parametrize("format", FORMATS)
def test_sound_comes_out_soon_after_it_went_in(format: str) -> None:
    """What has come out so far is a file that plays: all but the last fifth of a second of it."""
    samples = tone(2.0)
    with Encoder(format, RATE) as encoder:
        so_far = b""
        for start in range(0, len(samples), 600):
            so_far += encoder.encode(samples[start : start + 600])
            seconds = (start + 600) / RATE
            if seconds in (0.5, 1.0, 1.5):
                rate, heard = decoded(so_far, format)
                assert len(heard) / rate >= seconds - 0.2


@pytest.mark.parametrize("format", FILES)
def test_a_file_that_is_cut_off_plays_until_there(format: str) -> None:
    data = streamed(tone(3.0), format, 600)
    rate, heard = decoded_until_broken(data[: len(data) * 2 // 3 + 1])
    assert 1.0 < heard / rate < 2.7


def decoded_until_broken(data: bytes) -> tuple[int, int]:
    """Rate and number of samples before FFmpeg finds the last packet broken, as players do."""
    num_heard = 0
    with av.open(io.BytesIO(data)) as file:
        try:
            for frame in file.decode(audio=0):
                num_heard += frame.samples
        except av.error.InvalidDataError:
            pass
        return file.streams.audio[0].rate, num_heard


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_there_may_be_no_sound(format: str, speed: float) -> None:
    with Encoder(format, RATE, speed) as encoder:
        assert encoder.encode(np.zeros(0, np.float32)) == b""
        data = encoder.finish()
    assert len(data) < 256  # no room for tags
    if format in EXACT:
        assert data[:4] == {"flac": b"fLaC", "wav": b"RIFF", "pcm": b""}[format]


def test_encoders_that_are_left_early_leave_nothing_behind() -> None:
    def leave(num_each: int) -> None:
        for number in range(num_each * len(FORMATS)):
            with Encoder(FORMATS[number % len(FORMATS)], 22_050, 1.5) as encoder:
                encoder.encode(tone(0.3))

    def held() -> tuple[int, int]:
        """Files and threads."""
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def resident_kib() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 1024

    leave(20)  # what FFmpeg sets up once
    before, kib_before = held(), resident_kib()
    leave(60)
    assert held() == before
    assert resident_kib() - kib_before < 8 * 1024  # an encoder has 100 KiB and more


def test_other_speeds_start_no_threads() -> None:
    before = len(os.listdir("/proc/self/task"))
    with Encoder("pcm", RATE, 1.5) as encoder:
        encoder.encode(tone(0.3))
        assert len(os.listdir("/proc/self/task")) == before


def test_closing_twice_or_after_the_end_does_no_harm() -> None:
    for format in FORMATS:
        encoder = Encoder(format, RATE, 2.0)
        encoder.encode(tone(0.2))
        encoder.finish()
        encoder.close()
        encoder.close()


@pytest.mark.parametrize(
    ("format", "rate", "speed", "message"),
    [
        ("ogg", RATE, 1.0, "format='ogg': must be one of mp3, opus, aac, flac, wav, pcm"),
        ("mp3", 7_999, 1.0, "rate=7999: must be from 8000 to 48000 Hz"),
        ("wav", 48_001, 1.0, "rate=48001: must be from 8000 to 48000 Hz"),
        ("wav", RATE, 0.24, r"speed=0.24: must be from 0.25 to 4.0"),
        ("opus", RATE, 4.01, r"speed=4.01: must be from 0.25 to 4.0"),
        ("pcm", RATE, float("nan"), r"speed=nan: must be from 0.25 to 4.0"),
    ],
)
def test_what_is_not_to_be_had_is_named(format: str, rate: int, speed: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Encoder(format, rate, speed)


def test_content_types() -> None:
    assert {format: content_type(format, 16_000) for format in FORMATS} == {
        "mp3": "audio/mpeg",
        "opus": "audio/opus",
        "aac": "audio/aac",
        "flac": "audio/flac",
        "wav": "audio/wav",
        "pcm": "audio/pcm;rate=16000;channels=1",
    }
    with pytest.raises(ValueError, match="format='mp4'"):
        content_type("mp4", RATE)


@pytest.mark.parametrize("format", ["flac", "mp3", "opus", "aac"])
@pytest.mark.parametrize("to_the_end", [False, True])
def test_what_is_closed_has_no_threads(format: str, to_the_end: bool) -> None:
    """Also where something still refers to it: who was cancelled may for long."""
    process, encoders = psutil.Process(), []
    before = process.num_threads()
    for _ in range(4):
        encoder = Encoder(format, 24_000, 0.8)
        encoder.encode(np.zeros(2400, np.float32))
        if to_the_end:
            encoder.finish()
        encoders.append(encoder)
    for encoder in encoders:
        encoder.close()
    assert process.num_threads() == before
