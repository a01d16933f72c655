"""A voice is the codes of a second or two of somebody's speech."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bounded_kv_speech import fsq
from bounded_kv_speech.codec import Encoder
from bounded_kv_speech.features import features
from bounded_kv_speech.frames import CODE_RATE, CODE_SAMPLES, FRAMES_PER_CODE, SAMPLE_RATE, Floats
from bounded_kv_speech.lm import SINK
from bounded_kv_speech.tokens import FIRST_CODE, VOICE

SHORTEST_S = 1.0
_QUIET = 0.05
"""Of its loudest code's level: what comes before is silence, and is left out."""


@torch.no_grad()
def codes_of(samples: Floats, encoder: Encoder) -> NDArray[np.int64]:
    """Codes `[N // CODE_SAMPLES]` of `samples [N]` at 24 kHz."""
    heard = features(samples)
    count = len(heard) // FRAMES_PER_CODE
    points = encoder(torch.from_numpy(heard[None, : count * FRAMES_PER_CODE]))
    return np.asarray(fsq.to_codes(points)[0].numpy())


def voice_of(samples: Floats, encoder: Encoder) -> NDArray[np.int64]:
    """Codes of a voice, of a sample `[N]` of it at 24 kHz, the first of it, to fill the sink.

    Raises:
        ValueError: less than `SHORTEST_S` of sound.
    """
    levels = np.sqrt(
        np.square(samples[: len(samples) // CODE_SAMPLES * CODE_SAMPLES])
        .reshape(-1, CODE_SAMPLES)
        .mean(1)
    )
    loud = np.flatnonzero(levels > _QUIET * levels.max(initial=0.0))
    first, last = (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (0, 0)
    seconds = (last - first) / CODE_RATE
    if seconds < SHORTEST_S:
        raise ValueError(
            f"the sample of the voice has {seconds:.2f} s of sound at {SAMPLE_RATE} Hz; "
            f"it must have {SHORTEST_S:g} s at least"
        )
    return codes_of(samples, encoder)[first : min(last, first + SINK - 1)]


def prompt_of(samples: Floats, encoder: Encoder) -> list[int]:
    """A sample as a stream's source: `VOICE`, then its codes. Raises as `voice_of` does."""
    return source_of(voice_of(samples, encoder))


def source_of(codes: NDArray[np.int64]) -> list[int]:
    """A voice's codes as a stream's source: `VOICE`, then their tokens."""
    return [VOICE, *(codes + FIRST_CODE).tolist()]
