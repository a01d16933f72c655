"""`make demo`: hear a paragraph, spoken by the embedded voice in one stream that does not grow.

vLLM with the plugin makes the tokens, the codec's decoder the sound, while the next tokens are
made. Shows when the first sound was there, how fast it came and what the stream held, and has an
independent judge write down what it hears.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from vllm.v1.engine.async_llm import AsyncLLM

from bounded_kv_speech.decode import StreamingDecoder
from bounded_kv_speech.frames import CODE_SAMPLES, SAMPLE_RATE, Floats
from bounded_kv_speech.front_end import FrontEnd
from bounded_kv_speech.package import BUILT_IN, Package
from bounded_kv_speech.recipe.judge import Judge, word_error_rate
from bounded_kv_speech.speak import Sampling, Speaker
from bounded_kv_speech.tokens import END, FIRST_CODE
from bounded_kv_speech.turns import given
from bounded_kv_speech.wav import WavFile
from vllm_bounded_kv.engine.endpoint import fetch_figures
from vllm_bounded_kv.engine.replicas import all_figures

PARAGRAPH = """
The old man lived in a small house near the river. Every morning he opened the window and listened
to the water. One day he found a letter under the door. It was written in a hand that he did not
know. Come to the mill before dark, it said, and bring nothing with you. He put on his coat and
walked along the bank until he saw the light. A young woman was waiting there with a lamp in her
hand. You are late, she said, but there is still time. They sat down by the fire, and she told him
the story of his own life.
"""
STREAM = "demo"


@dataclass
class Reading:
    """The stream as the engine showed it once."""

    audio_s: float
    position: int
    blocks: int


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default=PARAGRAPH)
    parser.add_argument("--voice", default="heart")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, default=Path("demo.wav"))
    parser.add_argument("--package", type=Path, default=BUILT_IN, help="folder of another voice")
    args = parser.parse_args(argv)
    try:
        package = Package.load(args.package)
    except OSError as error:
        parser.error(str(error))
    if args.voice not in package.voices:
        parser.error(f"--voice {args.voice}: must be one of {', '.join(package.voices)}")
    text = " ".join(args.text.split())
    sentences = FrontEnd().utterances(text)
    if not sentences:
        parser.error("--text: has nothing that can be said")
    print(f"> {text}\n\nstarting vLLM with --kv-plugin bounded ...", flush=True)
    return asyncio.run(_demo(package, args, text, sentences))


async def _demo(
    package: Package, args: argparse.Namespace, text: str, utterances: list[list[int]]
) -> int:
    llm = AsyncLLM.from_engine_args(package.engine_args(max_streams=1))
    readings: list[Reading] = []
    spoken: list[Floats] = []
    ends, codes, first = [], 0, 0.0
    sampling = Sampling(seed=args.seed)

    try:
        async with Speaker(llm, StreamingDecoder(package.codec.decoder, 1)) as speaker:
            with WavFile(args.out) as file:
                start = time.perf_counter()
                voice = package.voices[args.voice]
                async for said in speaker.speak(STREAM, voice, given(utterances), sampling):
                    file.write(said.samples)
                    spoken.append(said.samples)
                    took = time.perf_counter() - start
                    first = first or (took if file.seconds else 0.0)
                    for token in said.tokens:
                        codes += token >= FIRST_CODE
                        if token == END:
                            ends.append(codes * CODE_SAMPLES)
                    if file.seconds >= 5.0 * len(readings):
                        await _read(llm, file.seconds, readings)
                    _show(file.seconds, took, first, readings)
    finally:
        llm.shutdown()
    print(f"\n\nwrote {args.out}\n")
    _table(readings)
    _judge(text, spoken, ends)
    return 0


async def _read(llm: AsyncLLM, audio_s: float, readings: list[Reading]) -> None:
    shown = all_figures(await fetch_figures(llm))
    for stream in shown["streams"]:
        readings.append(Reading(audio_s, stream["position"], stream["blocks"]))


def _show(audio_s: float, took_s: float, first_s: float, readings: list[Reading]) -> None:
    held = f"{readings[-1].blocks} blocks" if readings else "-"
    print(
        f"\r{audio_s:5.1f} s of speech; first after {first_s * 1e3:.0f} ms; real-time factor "
        f"{took_s / max(audio_s, 1e-9):.2f}; {held} held",
        end="",
        flush=True,
    )


def _table(readings: list[Reading]) -> None:
    print(f"{'speech':>9}{'position':>11}{'blocks held':>14}")
    for reading in readings:
        print(f"{reading.audio_s:7.1f} s{reading.position:>11,}{reading.blocks:>14}")


def _judge(text: str, spoken: list[Floats], ends: list[int]) -> None:
    judge = Judge()
    sounds = np.split(np.concatenate(spoken), ends[:-1])
    heard = " / ".join(judge.hear(sound) for sound in sounds if len(sound) > SAMPLE_RATE // 10)
    print(f"\nPocketSphinx hears: {heard}")
    print(f"word error rate: {word_error_rate([(text, heard)]):.2f}")


if __name__ == "__main__":
    sys.exit(main())
