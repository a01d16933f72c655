"""What the codec's encoder hears: spectra of a waveform, frame by frame.

Mel bands tell the vowels and consonants; the lowest bins of the FFT, 20 Hz apart, tell the pitch.
"""

from __future__ import annotations

import numpy as np

from bounded_kv_speech.frames import Floats, spectra, to_bands

FFT_SIZE = 1200
NUM_MELS = 64
LOW_BINS = slice(2, 58)
"""40 Hz to 1,140 Hz."""
NUM_FEATURES = NUM_MELS + LOW_BINS.stop - LOW_BINS.start
FLOOR = 1e-8
"""Of a mean power, full scale being 1."""
WINDOW = np.hanning(FFT_SIZE + 1)[:-1].astype(np.float32)
_MELS = to_bands(NUM_MELS, FFT_SIZE)


def features(samples: Floats) -> Floats:
    """Features `[N // HOP, NUM_FEATURES]` of `samples [N]`, about 0 and about 1 in size."""
    power = np.square(np.abs(spectra(samples, WINDOW))) / np.float32(np.square(WINDOW).sum())
    mels = np.log(power @ _MELS + FLOOR)
    low = np.log(power[:, LOW_BINS] + FLOOR)
    return ((np.concatenate([mels, low], axis=1) + 9.0) / 4.0).astype(np.float32)
