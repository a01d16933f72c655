"""`python -m bounded_kv_speech.recipe.unpack`: what was packed, for its training to go on.

Writes the codec (`codec.pt`) and the language model (`packed.pt`, for `train_lm --begin`) into a
work folder. A package has no optimiser: a training that goes on takes its learning rate up anew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from bounded_kv_speech.package import BUILT_IN, Package, model_of
from bounded_kv_speech.recipe.train_codec import NAME as CODEC
from bounded_kv_speech.recipe.train_lm import Voice
from bounded_kv_speech.recipe.training import checkpoint_of
from bounded_kv_speech.tokens import FIRST_CODE

PACKED = "packed"


def main(argv: list[str] | None = None) -> int:
    """Write both, unless one is there."""
    parser = argparse.ArgumentParser(prog="python -m bounded_kv_speech.recipe.unpack")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--package", type=Path, default=BUILT_IN, help="(%(default)s)")
    args = parser.parse_args(argv)
    try:
        package = Package.load(args.package)
    except OSError as error:
        parser.error(str(error))
    args.work.mkdir(parents=True, exist_ok=True)
    states = {CODEC: package.codec.state_dict(), PACKED: voice_from(args.package).state_dict()}
    for name in states:
        path = checkpoint_of(args.work, name)
        if path.exists():
            parser.error(f"--work {args.work}: has a {path.name} already; name another folder")
    for name, state in states.items():
        torch.save({"model": state}, checkpoint_of(args.work, name))
    return 0


def voice_from(folder: Path) -> Voice:
    """A package's language model, its table of embeddings in two parts again.

    What codes share is what the grid's coordinates say best of their rows (least squares).
    """
    stored = load_file(model_of(folder) / "model.safetensors")
    packed = {name: value.float() for name, value in stored.items()}
    table = packed.pop("model.embed_tokens.weight")
    voice = Voice()
    of_llama = {name.removeprefix("model."): value for name, value in packed.items()}
    voice.llama.load_state_dict(of_llama)
    codes = table[FIRST_CODE:].double()
    with torch.no_grad():
        # Not LAPACK's default driver: the coordinates depend on each other.
        shared = torch.linalg.lstsq(voice.properties.double(), codes, driver="gelsd").solution
        voice.of_property.copy_(shared)
        voice.own.zero_()
        voice.own.copy_(table - voice.table())
    return voice


if __name__ == "__main__":
    sys.exit(main())
