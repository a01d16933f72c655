"""What a client hears of a response's bytes."""

from __future__ import annotations

import io

import av
import numpy as np

RATE = 24_000


def samples_of(data: bytes, format: str) -> np.ndarray:
    """Samples of 16 bits at `RATE`, as PyAV decodes them."""
    if format == "pcm":
        return np.frombuffer(data, "<i2")
    with av.open(io.BytesIO(data)) as file:
        resampler = av.AudioResampler("s16", "mono", RATE)
        frames = [f for frame in file.decode(audio=0) for f in resampler.resample(frame)]
        frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
