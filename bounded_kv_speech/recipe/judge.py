"""Who says whether speech is understood: PocketSphinx with its own model and an open vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import soxr
from pocketsphinx import Decoder

from bounded_kv_speech.frames import SAMPLE_RATE, Floats

JUDGE_RATE = 16_000
_SILENCE_S = 0.25
_PEAK = 0.7
_HISS = 1e-4
"""Digital silence is outside of what its model has heard."""


class Judge:
    """Hears 24 kHz, writes words."""

    def __init__(self) -> None:
        self._decoder = Decoder(samprate=float(JUDGE_RATE), loglevel="FATAL")

    def hear(self, samples: Floats) -> str:
        """What `samples [N]` say, in lower case."""
        heard = soxr.resample(samples, SAMPLE_RATE, JUDGE_RATE)
        heard = np.pad(
            heard * (_PEAK / max(float(np.abs(heard).max()), 1e-6)), int(_SILENCE_S * JUDGE_RATE)
        )
        heard = heard + np.random.default_rng(0).normal(0, _HISS, len(heard))
        self._decoder.start_utt()
        self._decoder.process_raw((heard * 32767).astype("<i2").tobytes(), full_utt=True)
        self._decoder.end_utt()
        hypothesis = self._decoder.hyp()
        return hypothesis.hypstr if hypothesis else ""


def words(text: str) -> list[str]:
    """Words of a text, in lower case, without punctuation."""
    return re.findall(r"[a-z']+", text.lower())


def errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Least number of words inserted, left out or exchanged (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, a in enumerate(said, 1):
        before, row = row, [i]
        for j, b in enumerate(heard, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
    return row[-1]


def word_error_rate(pairs: Iterable[tuple[str, str]]) -> float:
    """Of what was said and what was heard, over all words said."""
    lists = [(words(said), words(heard)) for said, heard in pairs]
    return sum(errors(a, b) for a, b in lists) / max(sum(len(a) for a, _ in lists), 1)
