"""What the decoder learns to say of a frame: pitch, harmonic envelope, noise envelope.

Read off a waveform whose pulses are known. In the bins about a frequency, the part of the spectrum
that one complex gain makes of the pulses' spectrum is harmonic, and the rest is noise (least
squares; the coherent part of the teacher's phases counts as harmonic, wherever its graph has it).
"""

from __future__ import annotations

import numpy as np

from bounded_kv_speech.features import FFT_SIZE, WINDOW, spectra
from bounded_kv_speech.frames import MIN_F0, NUM_HARMONIC, NUM_NOISE, Floats, to_bands

REACH = 6
"""Bins on either side that share a gain: 120 Hz."""
FLOOR = 1e-5
_HARMONIC = to_bands(NUM_HARMONIC, FFT_SIZE)
_NOISE = to_bands(NUM_NOISE, FFT_SIZE)
_NOISE_POWER = float(np.square(WINDOW).sum())
_KERNEL = np.bartlett(2 * REACH + 3)[1:-1].astype(np.float32)


def _blur(x: np.ndarray) -> np.ndarray:
    """Weighted sum over the bins about each, `[F, K]`."""
    padded = np.pad(x, ((0, 0), (REACH, REACH)))
    return np.asarray(
        sum(w * padded[:, i : i + x.shape[1]] for i, w in enumerate(_KERNEL)), x.dtype
    )


def envelopes(samples: Floats, pulses: Floats, f0: Floats) -> Floats:
    """Frames `[F, NUM_VALUES]` of `samples [N]` with `pulses [N]` and `f0 [F]` in Hz."""
    sound, source = spectra(samples)[: len(f0)], spectra(pulses)[: len(f0)]
    f0 = f0[: len(sound)]
    cross, power = _blur(sound * source.conj()), _blur(np.square(np.abs(source)))
    voiced = f0 >= MIN_F0
    gain = np.where(voiced[:, None], cross / (power + 1e-3), 0)
    rest = np.square(np.abs(sound - gain * source)) / _NOISE_POWER
    harmonic = 0.5 * np.log(np.square(np.abs(gain)) @ _HARMONIC + FLOOR**2)
    noise = 0.5 * np.log(rest @ _NOISE + FLOOR**2)
    pitch = np.log(np.maximum(f0, MIN_F0))
    return np.concatenate([harmonic, noise, pitch[:, None], voiced[:, None]], axis=1).astype(
        np.float32
    )
