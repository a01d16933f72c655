"""Sound to a WAV file while it is made: 16 bits, one channel."""

from __future__ import annotations

import wave
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import soxr

from bounded_kv_speech.frames import SAMPLE_RATE, Floats


class WavFile:
    """A WAV file that grows, as a context manager."""

    def __init__(self, path: Path) -> None:
        """Begins the file."""
        self._file = wave.open(str(path), "wb")  # noqa: SIM115  (lives as long as we do)
        self._file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        self.seconds = 0.0
        """Written so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, samples: Floats) -> None:
        """Append `samples [N]`; what is beyond full scale is cut."""
        self._file.writeframes(to_pcm(samples))
        self.seconds += len(samples) / SAMPLE_RATE


def to_pcm(samples: Floats) -> bytes:
    """Little-endian 16 bits a sample."""
    return np.clip(np.rint(samples * 32767), -32768, 32767).astype("<i2").tobytes()


def read_wav(path: Path) -> Floats:
    """A file's sound `[N]` at 24 kHz, its channels mixed.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no WAV file of 16 bits.
    """
    try:
        with wave.open(str(path), "rb") as file:
            if file.getsampwidth() != 2:
                raise ValueError(f"{path}: has {8 * file.getsampwidth()} bits a sample; must be 16")
            frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            mono = frames.reshape(-1, file.getnchannels()).mean(1) / 32768
            rate = file.getframerate()
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{path}: is no WAV file: {error}") from error
    return np.asarray(soxr.resample(mono, rate, SAMPLE_RATE), np.float32)
