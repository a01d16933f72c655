"""The 44 bytes before the samples of a WAV file of 16 bits and one channel."""

from __future__ import annotations

import struct

UNKNOWN = 0xFFFFFFFF
"""As a size: the file is still being made, or too long for its 32 bits."""
_SAMPLE_BYTES = 2
_REST_OF_HEADER = 36


def wav_header(rate: int, num_bytes: int | None = None) -> bytes:
    """Header of `num_bytes` of samples at `rate` Hz; `None`: nobody knows yet how many."""
    size = UNKNOWN if num_bytes is None else min(num_bytes, UNKNOWN)
    pcm, channels = 1, 1
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        min(size + _REST_OF_HEADER, UNKNOWN),
        b"WAVE",
        b"fmt ",
        16,
        pcm,
        channels,
        rate,
        rate * _SAMPLE_BYTES,
        _SAMPLE_BYTES,
        8 * _SAMPLE_BYTES,
        b"data",
        size,
    )
