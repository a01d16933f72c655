"""`python -m bounded_kv_speech.recipe.corpus`: the teacher speaks, the codec's lessons are kept.

What a sentence's voice, pace and noise are depends on its number alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bounded_kv_speech.features import features
from bounded_kv_speech.frames import CODE_RATE, FRAMES_PER_CODE, HOP, SAMPLE_RATE, Floats
from bounded_kv_speech.recipe import shards, text
from bounded_kv_speech.recipe.arguments import amount, count
from bounded_kv_speech.recipe.envelopes import envelopes
from bounded_kv_speech.recipe.teacher import Teacher, Utterance, any_voice
from bounded_kv_speech.tokens import SPEECH, phone_spans, to_phones

FOLDER = "corpus"
SHARD_SENTENCES = 128
PACES = (0.92, 1.12)


@dataclass(frozen=True)
class Corpus:
    """Some sentences, one after the other."""

    features: Floats
    """`[F, NUM_FEATURES]`, float16."""
    targets: Floats
    """`[F, NUM_VALUES]`, float16."""
    marks: NDArray[np.int16]
    """`[F / FRAMES_PER_CODE]`: of the codes (`tokens.py`)."""


def main(argv: list[str] | None = None) -> int:
    """Write the shards."""
    parser = argparse.ArgumentParser(prog="python -m bounded_kv_speech.recipe.corpus")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--hours", type=amount, default=4.0, help="of speech (%(default)s)")
    parser.add_argument("--processes", type=count, default=2)
    args = parser.parse_args(argv)
    seen, _ = text.load(args.work)
    shards.make(args.work / FOLDER, args.hours, args.processes, partial(_Maker, seen))
    return 0


def load(work: Path) -> Corpus:
    """All that there is in a work folder.

    Raises:
        FileNotFoundError: when there is nothing.
    """
    found = shards.load(work / FOLDER, __spec__.name)
    return Corpus(*(np.concatenate([each[f.name] for each in found]) for f in fields(Corpus)))


def phones_at(utterance: Utterance, count: int) -> NDArray[np.int64]:
    """Which phone sounds at the middle of each of the first `count` codes, from 1; 0: none yet."""
    # The first of the ends is that of the silence before; the last phone has the silence after.
    spans = phone_spans(utterance.phonemes)
    ends = np.array([utterance.ends[0]] + [utterance.ends[behind] for _, behind in spans])
    middles = (np.arange(count) + 0.5) / CODE_RATE
    return np.minimum(np.searchsorted(ends, middles, side="right"), len(spans))


def marks_of(utterance: Utterance, count: int) -> NDArray[np.int64]:
    """Marks of an utterance's first `count` codes."""
    return np.array([SPEECH, *to_phones(utterance.phonemes)])[phones_at(utterance, count)]


class _Maker:
    """Makes shards in one process."""

    def __init__(self, sentences: list[str]) -> None:
        self._sentences, self._teacher = sentences, Teacher()

    def __call__(self, number: int) -> tuple[float, shards.Arrays]:
        heard, said, marked = [], [], []
        for i in range(number * SHARD_SENTENCES, (number + 1) * SHARD_SENTENCES):
            rng = np.random.default_rng([1, i])
            voice, pace = any_voice(rng), float(rng.uniform(*PACES))
            for phonemes in self._teacher.phonemes(self._sentences[i % len(self._sentences)]):
                utterance = self._teacher.say(phonemes, voice, i, pace)
                targets = envelopes(utterance)
                count = len(targets) // FRAMES_PER_CODE
                heard.append(features(utterance.samples)[: count * FRAMES_PER_CODE])
                said.append(targets[: count * FRAMES_PER_CODE])
                marked.append(marks_of(utterance, count))
        return sum(map(len, said)) * HOP / SAMPLE_RATE, {
            "features": np.concatenate(heard).astype(np.float16),
            "targets": np.concatenate(said).astype(np.float16),
            "marks": np.concatenate(marked).astype(np.int16),
        }


if __name__ == "__main__":
    sys.exit(main())
