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
from tqdm import tqdm

from bounded_kv_speech.features import features
from bounded_kv_speech.frames import FRAMES_PER_CODE, HOP, SAMPLE_RATE, Floats
from bounded_kv_speech.recipe import text
from bounded_kv_speech.recipe.envelopes import envelopes
from bounded_kv_speech.recipe.teacher import Teacher, any_voice

SHARD_SENTENCES = 128
PACES = (0.92, 1.12)


@dataclass(frozen=True)
class Shard:
    """Some sentences, one after the other."""

    features: Floats
    """`[F, NUM_FEATURES]`, float16."""
    targets: Floats
    """`[F, NUM_VALUES]`, float16."""


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
    )


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
    heard, said = [], []
    for i in range(number * SHARD_SENTENCES, (number + 1) * SHARD_SENTENCES):
        rng = np.random.default_rng([1, i])
        voice, pace = any_voice(rng), float(rng.uniform(*PACES))
        for phonemes in _teacher.phonemes(_sentences[i % len(_sentences)]):
            utterance = _teacher.say(phonemes, voice, i, pace)
            targets = envelopes(utterance.samples, utterance.pulses, utterance.f0)
            length = len(targets) // FRAMES_PER_CODE * FRAMES_PER_CODE
            heard.append(features(utterance.samples)[:length])
            said.append(targets[:length])
    seconds = sum(map(len, said)) * HOP / SAMPLE_RATE
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(
            file,
            features=np.concatenate(heard).astype(np.float16),
            targets=np.concatenate(said).astype(np.float16),
        )
    path.with_suffix(".json").write_text(json.dumps({"seconds": seconds}))
    part.rename(path)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
