"""`python -m bounded_kv_speech.recipe.pack`: what was trained, as the package that speaks."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bounded_kv_speech.frames import FRAMES_PER_CODE, Floats
from bounded_kv_speech.lm import SINK
from bounded_kv_speech.package import BUILT_IN, save
from bounded_kv_speech.recipe import teacher, text
from bounded_kv_speech.recipe.train_codec import load_codec
from bounded_kv_speech.recipe.train_lm import load_voice
from bounded_kv_speech.voice import voice_of

CANDIDATES = 24
"""Sentences, the longest of some, that a voice's sample is chosen from."""


def main(argv: list[str] | None = None) -> int:
    """Write the package, with a sample of each voice that is built in."""
    parser = argparse.ArgumentParser(prog="python -m bounded_kv_speech.recipe.pack")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--out", type=Path, default=BUILT_IN, help="(%(default)s)")
    args = parser.parse_args(argv)
    codec, lm = load_codec(args.work), load_voice(args.work)
    seen, _ = text.load(args.work)
    speaker = teacher.Teacher()
    sentences = sorted(seen[:200], key=len)[-CANDIDATES:]
    phonemes = [next(speaker.phonemes(sentence)) for sentence in sentences]
    voices = {
        name: voice_of(
            typical([speaker.say(each, voice, i) for i, each in enumerate(phonemes)]), codec.encoder
        )
        for name, voice in teacher.BUILT_IN.items()
    }
    save(args.out, lm.weights(), codec, voices)
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(args.out)}"
        for path in sorted(args.out.rglob("*.safetensors"))
    ]
    (args.out / "SHA256SUMS").write_text("\n".join(sums) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB, voices {', '.join(voices)}")
    return 0


def typical(said: Sequence[teacher.Utterance]) -> Floats:
    """The one whose beginning has the pitch that is usual: many a sentence begins high."""

    def pitch(f0: Floats) -> float:
        return float(np.median(np.log(f0[f0 > 0])))

    usual = float(np.mean([pitch(each.f0) for each in said]))
    size = SINK * FRAMES_PER_CODE
    nearest = min(said, key=lambda each: abs(pitch(each.f0[:size]) - usual))
    return nearest.samples


if __name__ == "__main__":
    sys.exit(main())
