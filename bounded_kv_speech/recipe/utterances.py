"""`python -m bounded_kv_speech.recipe.utterances`: the teacher's speech as the model's tokens.

Sittings of some sentences in one voice, as tokens (`tokens.py`) of the trained codec. Shards in the
work folder, each written whole, so that a stopped run goes on; what a sitting's voice is, and each
sentence's pace, depends on its number alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from bounded_kv_speech.codec import Encoder
from bounded_kv_speech.frames import CODE_RATE
from bounded_kv_speech.recipe import text
from bounded_kv_speech.recipe.corpus import PACES, marks_of
from bounded_kv_speech.recipe.teacher import Teacher, Utterance, any_voice
from bounded_kv_speech.recipe.train_codec import Codec, load_codec
from bounded_kv_speech.tokens import FIRST_CODE, SPEECH, TEXT, phone_spans
from bounded_kv_speech.voice import codes_of

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
    parser.add_argument("--hours", type=float, default=30.0, help="of speech (%(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    folder = args.work / "utterances"
    folder.mkdir(parents=True, exist_ok=True)
    seen, _ = text.split(text.sentences(text.download(args.work / "text")))
    wanted, done, number = args.hours * 3600, 0.0, 0
    with (
        get_context("spawn").Pool(args.processes, _begin, (args.work, seen)) as pool,
        tqdm(total=round(wanted), unit="s of speech", file=sys.stderr) as bar,
    ):
        while done < wanted:
            numbers = range(number, number + args.processes)
            done, number = done + sum(pool.map(_make, numbers)), numbers.stop
            bar.update(round(done) - bar.n)
    return 0


def load(work: Path) -> Sittings:
    """All shards of a work folder.

    Raises:
        FileNotFoundError: when there are none.
    """
    paths = sorted((work / "utterances").glob("*.npz"))
    if not paths:
        raise FileNotFoundError(f"no utterances in {work}; make them with -m {__spec__.name}")
    shards = [np.load(path) for path in tqdm(paths, unit=" shards", file=sys.stderr)]
    lengths = np.concatenate([shard["lengths"] for shard in shards])
    per_shard = np.array([len(shard["lengths"]) for shard in shards])
    first = np.repeat(np.arange(len(shards)) * SITTINGS, per_shard)
    return Sittings(
        np.concatenate([shard["tokens"] for shard in shards]),
        np.concatenate([[0], np.cumsum(lengths)]),
        first + np.concatenate([shard["sitting"] for shard in shards]),
    )


def write(utterance: Utterance, encoder: Encoder) -> NDArray[np.int64]:
    """An utterance as the language model's tokens, `TEXT` first and without an `END`."""
    codes = codes_of(utterance.samples, encoder)
    marked = marks_of(utterance, len(codes))
    keep = np.ones(len(codes), bool)
    spoken = np.flatnonzero(marked != SPEECH)
    keep[: max(spoken[0] - LEAD_CODES, 0)] = False
    last_phone_ends = utterance.ends[-2]
    keep[int(np.ceil(last_phone_ends * CODE_RATE)) + LAST_SILENCE :] = False
    spans = phone_spans(utterance.phonemes)
    phones = [token for token, _ in spans]
    starts = np.array([utterance.ends[0], *(utterance.ends[behind] for _, behind in spans[:-1])])
    # Echoes come before the first code whose middle is theirs; a phone too short for one has none.
    middles = (np.arange(len(codes)) + 0.5) / CODE_RATE
    places = np.searchsorted(middles, starts)
    places -= np.concatenate([[0], np.cumsum(~keep)])[np.minimum(places, len(keep))]
    sound = np.insert(codes[keep] + FIRST_CODE, np.minimum(places, keep.sum()), phones)
    return np.concatenate([[TEXT], phones, [SPEECH], sound])


_work: Path
_sentences: list[str]
_teacher: Teacher | None = None
_codec: Codec | None = None


def _begin(work: Path, sentences: list[str]) -> None:
    """What a process of the pool is given once."""
    global _work, _sentences
    _work, _sentences = work, sentences
    torch.set_num_threads(1)


def _make(number: int) -> float:
    """Write a shard, if it is not there; returns the seconds of its speech."""
    global _teacher, _codec
    path = _work / "utterances" / f"{number:05d}.npz"
    if path.exists():
        return float(json.loads(path.with_suffix(".json").read_text())["seconds"])
    _teacher, _codec = _teacher or Teacher(), _codec or load_codec(_work)
    said: list[NDArray[np.int64]] = []
    sitting: list[int] = []
    for i in range(SITTINGS):
        voice = any_voice(np.random.default_rng([2, number, i]))
        for j in range(SITTING):
            at = (number * SITTINGS + i) * SITTING + j
            pace = float(np.random.default_rng([3, at]).uniform(*PACES))
            for phonemes in _teacher.phonemes(_sentences[at % len(_sentences)]):
                said.append(write(_teacher.say(phonemes, voice, at, pace), _codec.encoder))
                sitting.append(i)
    tokens = np.concatenate(said)
    seconds = float((tokens >= FIRST_CODE).sum()) / CODE_RATE
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(
            file,
            tokens=tokens.astype(np.int16),
            lengths=np.array([len(each) for each in said]),
            sitting=np.array(sitting),
        )
    path.with_suffix(".json").write_text(json.dumps({"seconds": seconds}))
    part.rename(path)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
