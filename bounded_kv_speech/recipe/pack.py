"""`python -m bounded_kv_speech.recipe.pack`: what was trained, as the package that speaks."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from bounded_kv_speech.package import BUILT_IN, save
from bounded_kv_speech.recipe import teacher, text
from bounded_kv_speech.recipe.train_codec import load_codec
from bounded_kv_speech.recipe.train_lm import load_voice
from bounded_kv_speech.voice import voice_of


def main(argv: list[str] | None = None) -> int:
    """Write the package, with a sample of each voice that is built in."""
    parser = argparse.ArgumentParser(prog="python -m bounded_kv_speech.recipe.pack")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--out", type=Path, default=BUILT_IN, help="(%(default)s)")
    args = parser.parse_args(argv)
    codec, lm = load_codec(args.work), load_voice(args.work)
    seen, _ = text.load(args.work)
    speaker = teacher.Teacher()
    phonemes = next(speaker.phonemes(max(seen[:200], key=len)))
    voices = {
        name: voice_of(speaker.say(phonemes, voice, i).samples, codec.encoder)
        for i, (name, voice) in enumerate(teacher.BUILT_IN.items())
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


if __name__ == "__main__":
    sys.exit(main())
