"""`python -m bounded_kv_speech.recipe.utterances`: the teacher's speech as the model's tokens.

Sittings of some sentences in one voice, as tokens (`tokens.py`) of the trained codec. What a
sitting's voice is, and each sentence's pace, depends on its number alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bounded_kv_speech.codec import Encoder
from bounded_kv_speech.frames import CODE_RATE
from bounded_kv_speech.recipe import shards, text
from bounded_kv_speech.recipe.arguments import amount, count, shard
from bounded_kv_speech.recipe.corpus import PACES, phones_at
from bounded_kv_speech.recipe.teacher import Teacher, Utterance, any_voice
from bounded_kv_speech.recipe.train_codec import load_codec
from bounded_kv_speech.tokens import FIRST_CODE, SPEECH, TEXT, to_phones
from bounded_kv_speech.voice import codes_of

FOLDER = "utterances"
SITTING, SITTINGS = 8, 16
"""Sentences of one voice, and how many such a shard has."""
LEAD_CODES = 3
"""Codes of silence before the first phone that are kept: the teacher's would delay first audio."""
LAST_SILENCE = 6
"""Codes of silence after the last phone that are kept at most, over what the phone itself has."""


@dataclass(frozen=True)
class Sittings:
    """Everything said, one after the other."""

    tokens: NDArray[np.int16]
    """`[N]`"""
    starts: NDArray[np.int64]
    """`[U + 1]`: where utterances begin, each with its `TEXT`."""
    sitting: NDArray[np.int64]
    """`[U]`: which utterances are of one voice, in one sitting."""

    def utterance(self, number: int) -> NDArray[np.int64]:
        """Its tokens, `TEXT` first."""
        return self.tokens[self.starts[number] : self.starts[number + 1]].astype(np.int64)


def main(argv: list[str] | None = None) -> int:
    """Write the shards."""
    parser = argparse.ArgumentParser(prog="python -m bounded_kv_speech.recipe.utterances")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--hours", type=amount, default=30.0, help="of speech (%(default)s)")
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument(
        "--first", type=shard, default=0, help="shard to begin at: to say other things than before"
    )
    args = parser.parse_args(argv)
    seen, _ = text.load(args.work)
    maker = partial(_Maker, args.work, seen)
    shards.make(args.work / FOLDER, args.hours, args.processes, maker, args.first)
    return 0


def load(work: Path) -> Sittings:
    """All that there is in a work folder.

    Raises:
        FileNotFoundError: when there is nothing.
    """
    found = shards.load(work / FOLDER, __spec__.name)
    lengths = np.concatenate([each["lengths"] for each in found])
    per_shard = np.array([len(each["lengths"]) for each in found])
    first = np.repeat(np.arange(len(found)) * SITTINGS, per_shard)
    return Sittings(
        np.concatenate([each["tokens"] for each in found]),
        np.concatenate([[0], np.cumsum(lengths)]),
        first + np.concatenate([each["sitting"] for each in found]),
    )


def write(utterance: Utterance, encoder: Encoder) -> NDArray[np.int64]:
    """An utterance as the language model's tokens, `TEXT` first and without an `END`."""
    codes = codes_of(utterance.samples, encoder)
    at = phones_at(utterance, len(codes))
    # Some of the silence before the first phone is kept, and some of that after the last.
    first = max(int(np.argmax(at > 0)) - LEAD_CODES, 0)
    kept = slice(first, int(np.ceil(utterance.ends[-2] * CODE_RATE)) + LAST_SILENCE)
    phones = to_phones(utterance.phonemes)
    # An echo comes before its phone's first code; that of a phone too short for one, where it ends.
    places = np.searchsorted(at[kept], np.arange(len(phones)) + 1)
    sound = np.insert(codes[kept] + FIRST_CODE, places, phones)
    return np.concatenate([[TEXT], phones, [SPEECH], sound])


class _Maker:
    """Makes shards in one process."""

    def __init__(self, work: Path, sentences: list[str]) -> None:
        torch.set_num_threads(1)
        self._sentences, self._teacher, self._codec = sentences, Teacher(), load_codec(work)

    def __call__(self, number: int) -> tuple[float, shards.Arrays]:
        said: list[NDArray[np.int64]] = []
        sitting: list[int] = []
        for i in range(SITTINGS):
            voice = any_voice(np.random.default_rng([2, number, i]))
            for j in range(SITTING):
                at = (number * SITTINGS + i) * SITTING + j
                pace = float(np.random.default_rng([3, at]).uniform(*PACES))
                for phonemes in self._teacher.phonemes(self._sentences[at % len(self._sentences)]):
                    utterance = self._teacher.say(phonemes, voice, at, pace)
                    said.append(write(utterance, self._codec.encoder))
                    sitting.append(i)
        tokens = np.concatenate(said)
        return float((tokens >= FIRST_CODE).sum()) / CODE_RATE, {
            "tokens": tokens.astype(np.int16),
            "lengths": np.array([len(each) for each in said]),
            "sitting": np.array(sitting),
        }


if __name__ == "__main__":
    sys.exit(main())
