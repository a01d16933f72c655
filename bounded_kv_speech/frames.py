"""The clock of the codec, and the bands in which its envelopes are given.

A code is 25 ms of sound, two frames of 12.5 ms. A frame says how its sound is made: with pulses of
one pitch (`f0`), filtered by the harmonic envelope, and with noise, filtered by its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Spectra = NDArray[np.complex64]

SAMPLE_RATE = 24_000
HOP = 300
"""Samples of a frame."""
FRAMES_PER_CODE = 2
CODE_SAMPLES = FRAMES_PER_CODE * HOP
CODE_RATE = SAMPLE_RATE // CODE_SAMPLES
"""Codes a second."""

NUM_HARMONIC, NUM_NOISE = 64, 32
"""Bands of the two envelopes, evenly spaced in mel from 0 Hz to half the sample rate."""
NUM_VALUES = NUM_HARMONIC + NUM_NOISE + 2
"""Of a frame: log amplitude of a harmonic by band, log deviation of the noise by band, log f0
(in Hz) and voicing (1: voiced)."""
MIN_F0, MAX_F0 = 50.0, 500.0
"""In Hz. A pitch below the first is none."""


def mel(hz: Floats | float) -> Floats:
    """Mel of a frequency (O'Shaughnessy's formula, as in HTK)."""
    return np.asarray(1127.0 * np.log1p(np.asarray(hz) / 700.0), np.float32)


def hz(mels: Floats | float) -> Floats:
    """Frequency of a mel."""
    return np.asarray(700.0 * np.expm1(np.asarray(mels) / 1127.0), np.float32)


def band_centres(num_bands: int) -> Floats:
    """Frequencies in Hz of `num_bands` bands, the first at 0 Hz, the last at the Nyquist's."""
    return hz(np.linspace(0.0, mel(SAMPLE_RATE / 2), num_bands, dtype=np.float32))


def bin_frequencies(fft_size: int) -> Floats:
    """Frequencies in Hz of the bins of a real FFT."""
    return np.fft.rfftfreq(fft_size, 1 / SAMPLE_RATE).astype(np.float32)


def interpolation(known: Floats, wanted: Floats) -> Floats:
    """Matrix `[len(known), len(wanted)]`: from values at some frequencies to those at others."""
    rows = [np.interp(wanted, known, one) for one in np.eye(len(known))]
    return np.asarray(rows, np.float32)


def from_bands(num_bands: int, fft_size: int) -> Floats:
    """Matrix `[num_bands, fft_size / 2 + 1]`: linear interpolation from bands to bins."""
    return interpolation(band_centres(num_bands), bin_frequencies(fft_size))


def to_bands(num_bands: int, fft_size: int) -> Floats:
    """Matrix `[fft_size / 2 + 1, num_bands]`: the mean of the bins about each band's centre."""
    weights = from_bands(num_bands, fft_size)
    return np.ascontiguousarray((weights / weights.sum(1, keepdims=True)).T)


def spectra(samples: Floats, window: Floats) -> Spectra:
    """STFT of `samples [N]`: `[N // HOP, len(window) / 2 + 1]`, about each frame's middle."""
    num_frames, size = len(samples) // HOP, len(window)
    padded = np.pad(samples, ((size - HOP) // 2, size))
    framed = np.lib.stride_tricks.sliding_window_view(padded, size)[::HOP][:num_frames]
    return np.fft.rfft(framed * window).astype(np.complex64)
