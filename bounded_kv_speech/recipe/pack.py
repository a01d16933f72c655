"""`python -m bounded_kv_speech.recipe.pack`: what was trained, as the package that speaks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bounded_kv_speech.frames import FRAMES_PER_CODE, Floats
from bounded_kv_speech.lm import SINK
from bounded_kv_speech.package import BUILT_IN, save, write_sums
from bounded_kv_speech.recipe import teacher, text
from bounded_kv_speech.recipe.train_codec import load_codec
from bounded_kv_speech.recipe.train_lm import load_voice
from bounded_kv_speech.voice import voice_of

CANDIDATES = 24
"""Sentences, the longest of some, that a voice's samples are chosen from."""


def main(argv: list[str] | None = None) -> int:
    """Write the package, with a sample of each voice that is built in."""
    parser = argparse.ArgumentParser(prog="python -m bounded_kv_speech.recipe.pack")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--out", type=Path, default=BUILT_IN, help="(%(default)s)")
    args = parser.parse_args(argv)
    codec, lm = load_codec(args.work), load_voice(args.work)
    seen, _ = text.load(args.work)
    voices = {
        name: voice_of(best, codec.encoder)
        for name, (best,) in samples_of(teacher.Teacher(), seen, 1).items()
    }
    save(args.out, lm.weights(), codec, voices)
    write_sums(args.out)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB, voices {', '.join(voices)}")
    return 0


def samples_of(speaker: teacher.Teacher, seen: list[str], count: int) -> dict[str, list[Floats]]:
    """Of each built-in voice, the `count` most typical of sentences learned from."""
    sentences = sorted(seen[:200], key=len)[-CANDIDATES:]
    phonemes = [next(speaker.phonemes(sentence)) for sentence in sentences]
    return {
        name: typical([speaker.say(each, voice, i) for i, each in enumerate(phonemes)])[:count]
        for name, voice in teacher.BUILT_IN.items()
    }


def typical(said: Sequence[teacher.Utterance]) -> list[Floats]:
    """Those first whose beginning has the pitch that is usual: many a sentence begins high."""

    def pitch(f0: Floats) -> float:
        return float(np.median(np.log(f0[f0 > 0])))

    usual = float(np.mean([pitch(each.f0) for each in said]))
    size = SINK * FRAMES_PER_CODE
    nearest = sorted(said, key=lambda each: abs(pitch(each.f0[:size]) - usual))
    return [each.samples for each in nearest]


if __name__ == "__main__":
    sys.exit(main())
