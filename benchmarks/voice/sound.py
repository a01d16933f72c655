"""What tells voices apart, read off the sound alone: pitch and the shape of the spectrum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bounded_kv_speech.features import NUM_MELS, features
from bounded_kv_speech.frames import HOP, SAMPLE_RATE, Floats

LOWEST, HIGHEST = 60.0, 450.0
"""Pitches that are looked for, in Hz."""
_SPAN = 1440
"""Samples of a frame: 60 ms, three periods and a half of the lowest."""
_FFT_SIZE = 4096
_FLATTENED, _TOP = 0.7, 2500.0
"""Power that amplitudes are raised to, so that no harmonic outdoes others, and up to which Hz."""
_PERIODIC = 0.35
"""Correlation of a voiced frame with itself a period later, at least."""
_LOUD = 0.1
"""Of the loudest frame's level: quieter ones are left out."""
_WINDOW = np.hanning(_SPAN + 1)[:-1]
_COUNTED = np.fft.rfftfreq(_FFT_SIZE, 1 / SAMPLE_RATE) < _TOP
_LAGS = slice(int(SAMPLE_RATE / HIGHEST), int(SAMPLE_RATE / LOWEST) + 1)


@dataclass(frozen=True)
class Likeness:
    """What a voice sounds like."""

    octaves: float
    """Median pitch, log2 of Hz."""
    spectrum: Floats
    """Mean log mel spectrum of what is voiced, `[NUM_MELS]`, whatever its level."""

    @classmethod
    def of(cls, samples: Floats) -> Likeness:
        """Of `samples [N]` at 24 kHz.

        Raises:
            ValueError: nothing in it is voiced.
        """
        found = pitches(samples)
        voiced = found > 0
        if not voiced.any():
            raise ValueError(f"{len(samples) / SAMPLE_RATE:.2f} s of sound: nothing is voiced")
        mean = features(samples)[voiced, :NUM_MELS].mean(0)
        return cls(float(np.median(np.log2(found[voiced]))), mean - mean.mean())


@dataclass(frozen=True)
class Scale:
    """How far voices are from each other, in pitch and in spectrum: what distances count in."""

    octaves: float
    spectrum: float

    @classmethod
    def among(cls, voices: list[Likeness]) -> Scale:
        """Mean distances of any two."""
        pairs = [(a, b) for i, a in enumerate(voices) for b in voices[:i]]
        return cls(
            float(np.mean([_octaves(a, b) for a, b in pairs])),
            float(np.mean([_spectrum(a, b) for a, b in pairs])),
        )

    def distances(self, a: Likeness, b: Likeness) -> dict[str, float]:
        """By pitch, by spectrum, and by both."""
        octaves, spectrum = _octaves(a, b) / self.octaves, _spectrum(a, b) / self.spectrum
        return {"pitch": octaves, "spectrum": spectrum, "both": float(np.hypot(octaves, spectrum))}


def _octaves(a: Likeness, b: Likeness) -> float:
    return abs(a.octaves - b.octaves)


def _spectrum(a: Likeness, b: Likeness) -> float:
    return float(np.sqrt(np.mean(np.square(a.spectrum - b.spectrum))))


def pitches(samples: Floats) -> NDArray[np.float64]:
    """Pitch in Hz of each frame of `samples [N]`, 0 where there is none: `[N // HOP]`.

    The lag at which a frame is most like itself, by the autocorrelation of its flattened spectrum
    over that of its window (Boersma 1993, with the compression of Tolonen and Karjalainen 2000);
    between samples by a parabola.
    """
    count = len(samples) // HOP
    padded = np.pad(samples.astype(np.float64), ((_SPAN - HOP) // 2, _SPAN))
    frames = np.lib.stride_tricks.sliding_window_view(padded, _SPAN)[::HOP][:count]
    frames = frames - frames.mean(1, keepdims=True)
    level = np.sqrt(np.square(frames).mean(1))
    spectrum = np.abs(np.fft.rfft(frames * _WINDOW, _FFT_SIZE)) ** _FLATTENED * _COUNTED
    alike = _correlation(spectrum, _LAGS.stop + 1)
    window = np.abs(np.fft.rfft(_WINDOW, _FFT_SIZE)) ** 2
    alike /= np.maximum(_correlation(window[None], _LAGS.stop + 1), 1e-3)
    here, before, after = (alike[:, _LAGS.start + i : _LAGS.stop + i] for i in (0, -1, 1))
    peaks = np.where((here >= before) & (here >= after), here, 0)
    rows, lag = np.arange(count), peaks.argmax(1)
    left, middle, right = before[rows, lag], here[rows, lag], after[rows, lag]
    bend = np.minimum(left - 2 * middle + right, -1e-9)
    lag = lag + _LAGS.start + np.clip(0.5 * (left - right) / bend, -0.5, 0.5)
    is_voiced = (peaks.max(1, initial=0) > _PERIODIC) & (level > _LOUD * level.max(initial=1e-9))
    return np.where(is_voiced, SAMPLE_RATE / lag, 0)


def _correlation(spectrum: NDArray[np.float64], lags: int) -> NDArray[np.float64]:
    """Of each row with itself, by lag, 1 at none."""
    found = np.fft.irfft(spectrum, _FFT_SIZE)[:, :lags]
    return np.asarray(found / np.maximum(found[:, :1], 1e-12))
