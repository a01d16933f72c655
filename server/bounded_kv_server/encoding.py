"""Sound to the bytes of a response, in the formats of OpenAI's speech API, as it comes.

One encoder makes one response, so that there is one header, and no seam between what was encoded
earlier and later. All formats are made of the same 16 bits a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from types import TracebackType
from typing import Self

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.container import OutputContainer

from bounded_kv_server.tempo import Tempo
from bounded_kv_server.wav_header import wav_header
from bounded_kv_speech.frames import Floats
from bounded_kv_speech.wav import to_pcm

HELD_S = 0.15
"""What a format other than WAV and PCM holds back at most, with what its decoder takes to begin."""
MIN_RATE, MAX_RATE = 8_000, 48_000
"""Of the samples, in Hz."""


@dataclass(frozen=True)
class _Codec:
    """How FFmpeg makes a format."""

    name: str
    muxer: str
    bit_rate: int | None = None
    """A second. `None`: it takes what it needs."""
    options: dict[str, str] = field(default_factory=dict)
    """Of the muxer."""

    def rate(self, rate: int) -> int:
        """The lowest rate that it takes without losing any of `rate` Hz."""
        rates = av.Codec(self.name, "w").audio_rates
        return rate if rates is None else min(r for r in rates if r >= rate)


_CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
FORMATS = tuple(_CONTENT_TYPES)
# Speech in one channel needs no more bits; mp3 takes no more at 8 kHz.
_CODECS = {
    "mp3": _Codec("libmp3lame", "mp3", 64_000),
    # A page is held back until the next one begins, and is a second long if not told otherwise.
    "opus": _Codec("libopus", "ogg", 48_000, {"page_duration": "40000"}),
    "aac": _Codec("aac", "adts", 64_000),
    # Else there is room for 8 KiB of tags before the sound.
    "flac": _Codec("flac", "flac", options={"metadata_header_padding": "0"}),
}


def content_type(format: str, rate: int) -> str:
    """The `Content-Type` of a response in `format`, of sound at `rate` Hz.

    Raises:
        ValueError: a format that is not among `FORMATS`.
    """
    _check_format(format)
    parameters = f";rate={rate};channels=1" if format == "pcm" else ""
    return _CONTENT_TYPES[format] + parameters


def encode_all(samples: Floats, format: str, rate: int, speed: float = 1.0) -> bytes:
    """The whole file of `samples [N]`, whose end is known. Raises as `Encoder` does."""
    if format == "wav":
        pcm = encode_all(samples, "pcm", rate, speed)
        return wav_header(rate, len(pcm)) + pcm
    with Encoder(format, rate, speed) as encoder:
        return encoder.encode(samples) + encoder.finish()


class Encoder:
    """Encodes one response, as a context manager. One channel.

    What leaving it early does not return is lost; nothing of FFmpeg's stays behind.
    """

    def __init__(self, format: str, rate: int, speed: float = 1.0) -> None:
        """Of samples at `rate` Hz, played `speed` times as fast.

        Raises:
            ValueError: naming the format, rate or speed that is not to be had.
        """
        _check_format(format)
        if not MIN_RATE <= rate <= MAX_RATE:
            raise ValueError(f"rate={rate}: must be from {MIN_RATE} to {MAX_RATE} Hz")
        self._tempo = None if speed == 1.0 else Tempo(rate, speed)
        held_s = HELD_S * (format in _CODECS) + (self._tempo.held_s if self._tempo else 0.0)
        self._held = round(held_s * speed * rate)
        """Samples that may be given without being in what `encode` has returned."""
        self._sound = _Coded(_CODECS[format], rate) if format in _CODECS else _Raw(format, rate)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def encode(self, samples: Floats) -> bytes:
        """The bytes, 0 or more, that are ready after `samples [N]`, 0 or more; full scale is 1."""
        if self._tempo and len(samples):
            samples = self._tempo.feed(samples)
        return self._sound.encode(to_pcm(samples)) if len(samples) else b""

    def settle(self) -> bytes:
        """What is held back, pushed out by silence: nothing more may come for a while."""
        return self.encode(np.zeros(self._held, np.float32))

    def finish(self) -> bytes:
        """The rest. Nothing may be encoded afterwards."""
        rest = self._tempo.finish() if self._tempo else np.zeros(0, np.float32)
        rest_bytes = self._sound.encode(to_pcm(rest)) if len(rest) else b""
        return rest_bytes + self._sound.finish()

    def close(self) -> None:
        """Free what FFmpeg holds, finished or not. May be called again."""
        self._tempo = None
        self._sound.close()


class _Raw:
    """Samples as they are, in WAV behind a header."""

    def __init__(self, format: str, rate: int) -> None:
        self._header = wav_header(rate) if format == "wav" else b""

    def encode(self, pcm: bytes) -> bytes:
        """The samples; the first of them behind the header."""
        header, self._header = self._header, b""
        return header + pcm

    def finish(self) -> bytes:
        """The header, if there was no sound at all."""
        return self.encode(b"")

    def close(self) -> None:
        """Nothing is held."""


class _Coded:
    """Samples through one of FFmpeg's encoders and muxers."""

    def __init__(self, codec: _Codec, rate: int) -> None:
        self._rate = rate
        self._num_samples = 0
        self._ready = _Bytes()
        muxer = av.open(self._ready, "w", codec.muxer, container_options=codec.options)
        stream = muxer.add_stream(codec.name, codec.rate(rate), layout="mono")
        assert isinstance(stream, av.AudioStream)
        if codec.bit_rate:
            stream.bit_rate = codec.bit_rate
        self._open: tuple[OutputContainer, av.AudioStream] | None = muxer, stream

    def encode(self, pcm: bytes) -> bytes:
        """What is ready after samples of 16 bits. PyAV resamples them if the codec needs that."""
        samples = np.frombuffer(pcm, "<i2")
        frame = AudioFrame.from_ndarray(samples[None], "s16", "mono")
        frame.sample_rate = self._rate
        frame.pts, frame.time_base = self._num_samples, Fraction(1, self._rate)
        self._num_samples += len(samples)
        self._mux(frame)
        return self._ready.take()

    def finish(self) -> bytes:
        """What the encoder still held, and the end of the file."""
        self._mux(None)
        self.close()
        return self._ready.take()

    def close(self) -> None:
        """Free the codec. PyAV's resampler has threads, which only go with what refers to it."""
        if self._open is not None:
            self._open[0].close()
            self._open = None

    def _mux(self, frame: AudioFrame | None) -> None:
        assert self._open is not None, "nothing may be encoded after the end"
        muxer, stream = self._open
        muxer.mux(stream.encode(frame))


class _Bytes:
    """The file that a muxer writes to. It cannot seek, so the muxer does not count on it."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._written.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        """What was written since the last call."""
        taken = b"".join(self._written)
        self._written.clear()
        return taken


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: must be one of {', '.join(FORMATS)}")
