"""What the decoder learns to say of a frame: pitch, harmonic envelope, noise envelope.

Read off the two parts of the teacher's sound. What is coherent is said by pulses of its pitch (by
what their power is multiplied with in the bins about a frequency, whatever the phase), the rest by
noise. Then both are corrected, a few times over, by how the mel spectrum of what they sound like
differs.
"""

from __future__ import annotations

import numpy as np

from bounded_kv_speech.frames import (
    HOP,
    MIN_F0,
    NUM_HARMONIC,
    NUM_NOISE,
    Floats,
    Spectra,
    band_centres,
    interpolation,
    spectra,
    to_bands,
)
from bounded_kv_speech.recipe.teacher import Utterance
from bounded_kv_speech.synth import synthesise_at_once

FFT_SIZE = 600
"""25 ms."""
REACH = 3
"""Bins on either side that share a gain: 120 Hz, so that there is a harmonic in each."""
FLOOR = 1e-5
CORRECTIONS, RATE, MOST = 3, 0.8, 0.7
"""How often, by which share of the difference, and by at most how many nepers of it."""
_WINDOW = np.hanning(FFT_SIZE + 1)[:-1].astype(np.float32)
_WINDOW_POWER = float(np.square(_WINDOW).sum())
_HARMONIC = to_bands(NUM_HARMONIC, FFT_SIZE)
_NOISE = to_bands(NUM_NOISE, FFT_SIZE)
_TO_NOISE = interpolation(band_centres(NUM_HARMONIC), band_centres(NUM_NOISE))
_KERNEL = np.bartlett(2 * REACH + 3)[1:-1].astype(np.float32)
_QUIET = 1e-7


def envelopes(utterance: Utterance) -> Floats:
    """Frames `[F, NUM_VALUES]` of an utterance."""
    frames = _read(utterance)
    wanted = _log_mel(spectra(utterance.samples, _WINDOW))[: len(frames)]
    for _ in range(CORRECTIONS):
        again = np.pad(synthesise_at_once(frames)[HOP:], (0, HOP))  # it is late by as much
        found = _log_mel(spectra(again, _WINDOW))[: len(wanted)]
        short = np.clip((wanted - found) / 2, -MOST, MOST) * RATE
        frames[: len(short), :NUM_HARMONIC] += short
        frames[: len(short), NUM_HARMONIC:-2] += short @ _TO_NOISE
    return frames


def _read(utterance: Utterance) -> Floats:
    f0 = utterance.f0
    coherent, noise, pulses = (
        np.square(np.abs(spectra(part, _WINDOW)[: len(f0)]))
        for part in (utterance.coherent, utterance.noise, utterance.pulses)
    )
    f0 = f0[: len(coherent)]
    voiced = f0 >= MIN_F0
    gain = np.where(voiced[:, None], _blur(coherent) / (_blur(pulses) + 1e-3), 0)
    rest = (noise + np.where(voiced[:, None], 0, coherent)) / _WINDOW_POWER
    harmonic = 0.5 * np.log(gain @ _HARMONIC + FLOOR**2)
    quiet = 0.5 * np.log(rest @ _NOISE + FLOOR**2)
    pitch = np.log(np.maximum(f0, MIN_F0))
    return np.concatenate([harmonic, quiet, pitch[:, None], voiced[:, None]], axis=1).astype(
        np.float32
    )


def _log_mel(sound: Spectra) -> Floats:
    return np.asarray(np.log(np.square(np.abs(sound)) @ _HARMONIC + _QUIET), np.float32)


def _blur(x: np.ndarray) -> np.ndarray:
    """Weighted sum over the bins about each, `[F, K]`."""
    padded = np.pad(x, ((0, 0), (REACH, REACH)))
    return np.asarray(
        sum(w * padded[:, i : i + x.shape[1]] for i, w in enumerate(_KERNEL)), x.dtype
    )
