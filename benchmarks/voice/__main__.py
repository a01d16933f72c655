"""`python -m benchmarks.voice`: how well the embedded voice speaks, through vLLM with the plugin.

Sentences in each voice, judged by PocketSphinx as the teacher says them, through the codec alone
and through the whole system; five minutes in one stream, and in some at once; the speed on one
core. Ends in one JSON line, and writes it to a folder with a plot and a sample of each voice. Exit
status 1 when a sentence was not said in order, babbled on, or the stream's blocks changed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.voice import endless, words
from benchmarks.voice.report import plot, table
from benchmarks.voice.spoken import Spoken, speaking
from benchmarks.voice.texts import sentences
from bounded_kv_speech.package import BUILT_IN, Package
from bounded_kv_speech.speak import Sampling
from bounded_kv_speech.wav import WavFile

AT_ONCE = 8
EITHER_END = 22
"""Sentences of about a minute."""


def main(argv: list[str] | None = None) -> int:
    """Evaluate; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.voice",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    texts = sentences()
    parser.add_argument("--package", type=Path, default=BUILT_IN, help="folder of the voice")
    parser.add_argument("--sentences", type=int, default=100, help=f"up to {len(texts)}")
    parser.add_argument("--voice", default="heart", help="of the five minutes (%(default)s)")
    parser.add_argument(
        "--long-streams",
        type=int,
        default=3,
        help="of five minutes, each by its seed (%(default)s)",
    )
    parser.add_argument("--temperature", type=float, default=Sampling.temperature)
    parser.add_argument("--top-k", type=int, default=Sampling.top_k)
    parser.add_argument("--out", type=Path, default=Path("build/voice"), help="(%(default)s)")
    parser.add_argument("--no-speed", action="store_true", help="words only")
    args = parser.parse_args(argv)
    if not 1 <= args.sentences <= len(texts):
        parser.error(f"--sentences {args.sentences}: must be 1 to {len(texts)}")
    if not 1 <= args.long_streams <= AT_ONCE:
        parser.error(f"--long-streams {args.long_streams}: must be 1 to {AT_ONCE}")
    try:
        package = Package.load(args.package)
    except OSError as error:
        parser.error(str(error))
    if args.voice not in package.voices:
        parser.error(f"--voice {args.voice}: must be one of {', '.join(package.voices)}")
    sampling = Sampling(args.temperature, args.top_k, seed=0)
    said, longs = asyncio.run(_say(package, texts, args, sampling))
    heard = words.hear_all(package, texts[: args.sentences], said)
    result: dict[str, Any] = {
        "setup": _setup(args, sampling),
        "wer": words.error_rates(heard),
        "order": words.order(heard),
        "nearest_to_own_voice": words.likeness(package, heard),
        **endless.judged(longs, EITHER_END),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    _write_samples(args.out, said, package)
    written = args.out / "voice.json"
    written.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not args.no_speed:
        result["one_core"] = _speed(args.package)
        written.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    plot(result, args.out / "voice.png")
    print(table(result), end="\n\n")
    print(json.dumps(result))
    return int(not is_sound(result))


def is_sound(result: dict[str, Any]) -> bool:
    """Whether everything was said to its end, in order, in time and in as many blocks."""
    order, long = result["order"], result["five_minutes"]
    return bool(
        order["in_order"] == order["sentences"]
        and not order[f"longer_than_{words.LONGEST:g}"]
        and long["in_order"]
        and len(long["blocks"]) == 1
    )


async def _say(
    package: Package, texts: list[str], args: argparse.Namespace, sampling: Sampling
) -> tuple[list[Spoken], list[endless.Endless]]:
    async with speaking(package, AT_ONCE) as (llm, speaker):
        said = await words.say_all(
            speaker, package, texts[: args.sentences], list(package.voices), sampling, AT_ONCE
        )
        long_text = endless.there_and_back(texts, EITHER_END)
        longs = await asyncio.gather(
            *(
                endless.say(
                    llm, speaker, package, long_text, args.voice, replace(sampling, seed=seed)
                )
                for seed in range(args.long_streams)
            )
        )
    return said, longs


def _speed(package: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.voice.speed", "--package", str(package)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _write_samples(folder: Path, said: list[Spoken], package: Package) -> None:
    """One sentence of each voice."""
    for i, name in enumerate(package.voices):
        if i < len(said):
            with WavFile(folder / f"{name}.wav") as file:
                file.write(said[i].samples)


def _setup(args: argparse.Namespace, sampling: Sampling) -> dict[str, Any]:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return {
        "sentences": args.sentences,
        "sampling": asdict(sampling),
        "cpu": platform.processor() or platform.machine(),
        "torch": version("torch"),
        "hibari-tts": version("hibari-tts"),
        "pocketsphinx": version("pocketsphinx"),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown",
    }


if __name__ == "__main__":
    sys.exit(main())
