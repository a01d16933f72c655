"""`python -m bounded_kv_speech.recipe.corpus`: the teacher speaks, the codec's lessons are kept.

Shards of sentences in the work folder, each written whole, so that a stopped run goes on. What a
sentence's voice, pace and noise are depends on its number alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bounded_kv_speech.features import features
from bounded_kv_speech.frames import CODE_RATE, FRAMES_PER_CODE, HOP, SAMPLE_RATE, Floats
from bounded_kv_speech.recipe import text
from bounded_kv_speech.recipe.envelopes import envelopes
from bounded_kv_speech.recipe.teacher import Teacher, Utterance, any_voice
from bounded_kv_speech.tokens import SPEECH, phone_spans

SHARD_SENTENCES = 128
PACES = (0.92, 1.12)


@dataclass(frozen=True)
class Shard:
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
    parser.add_argument("--hours", type=float, default=4.0, help="of speech (%(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    folder = args.work / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    seen, _ = text.split(text.sentences(text.download(args.work / "text")))
    wanted, done, number = args.hours * 3600, 0.0, 0
    with (
        get_context("spawn").Pool(args.processes, _begin, (folder, seen)) as pool,
        tqdm(total=round(wanted), unit="s of speech", file=sys.stderr) as bar,
    ):
        while done < wanted:
            numbers = range(number, number + args.processes)
            done, number = done + sum(pool.map(_make, numbers)), numbers.stop
            bar.update(round(done) - bar.n)
    return 0


def load(folder: Path) -> Shard:
    """All shards of a work folder, one after the other.

    Raises:
        FileNotFoundError: when there are none.
    """
    paths = sorted((folder / "corpus").glob("*.npz"))
    if not paths:
        raise FileNotFoundError(f"no corpus in {folder}; make it with -m {__spec__.name}")
    shards = [np.load(path) for path in tqdm(paths, unit=" shards", file=sys.stderr)]
    return Shard(
        np.concatenate([shard["features"] for shard in shards]),
        np.concatenate([shard["targets"] for shard in shards]),
        np.concatenate([shard["marks"] for shard in shards]),
    )


def marks_of(utterance: Utterance, count: int) -> NDArray[np.int64]:
    """Marks of an utterance's first `count` codes: the phone at the middle of each."""
    spans = phone_spans(utterance.phonemes)
    # The first of the ends is that of the silence before; the last phone has the silence after.
    ends = np.array([utterance.ends[0]] + [utterance.ends[behind] for _, behind in spans])
    middles = (np.arange(count) + 0.5) / CODE_RATE
    tokens = np.array([SPEECH] + [token for token, _ in spans])
    return tokens[np.minimum(np.searchsorted(ends, middles, side="right"), len(spans))]


_folder: Path
_sentences: list[str]
_teacher: Teacher | None = None


def _begin(folder: Path, sentences: list[str]) -> None:
    """What a process of the pool is given once."""
    global _folder, _sentences
    _folder, _sentences = folder, sentences


def _make(number: int) -> float:
    """Write a shard, if it is not there; returns the seconds of its speech."""
    global _teacher
    path = _folder / f"{number:05d}.npz"
    if path.exists():
        return float(json.loads(path.with_suffix(".json").read_text())["seconds"])
    _teacher = _teacher or Teacher()
    heard, said, marked = [], [], []
    for i in range(number * SHARD_SENTENCES, (number + 1) * SHARD_SENTENCES):
        rng = np.random.default_rng([1, i])
        voice, pace = any_voice(rng), float(rng.uniform(*PACES))
        for phonemes in _teacher.phonemes(_sentences[i % len(_sentences)]):
            utterance = _teacher.say(phonemes, voice, i, pace)
            targets = envelopes(utterance.samples, utterance.pulses, utterance.f0)
            count = len(targets) // FRAMES_PER_CODE
            heard.append(features(utterance.samples)[: count * FRAMES_PER_CODE])
            said.append(targets[: count * FRAMES_PER_CODE])
            marked.append(marks_of(utterance, count))
    seconds = sum(map(len, said)) * HOP / SAMPLE_RATE
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(
            file,
            features=np.concatenate(heard).astype(np.float16),
            targets=np.concatenate(said).astype(np.float16),
            marks=np.concatenate(marked).astype(np.int16),
        )
    path.with_suffix(".json").write_text(json.dumps({"seconds": seconds}))
    part.rename(path)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
