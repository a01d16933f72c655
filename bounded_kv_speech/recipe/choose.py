"""`python -m bounded_kv_speech.recipe.choose`: of each voice, the sample that speaks best.

Any second or two of a voice makes a stream speak in it, some more clearly than others. Of samples
with a pitch that is usual, the package gets the one in which the judge understands most words of
sentences never learned from, said through vLLM with the plugin. Half of them go after each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.engine.async_llm import AsyncLLM

from bounded_kv_speech.decode import StreamingDecoder
from bounded_kv_speech.frames import Floats
from bounded_kv_speech.front_end import FrontEnd
from bounded_kv_speech.package import BUILT_IN, Package, save_voices, write_sums
from bounded_kv_speech.recipe import teacher, text
from bounded_kv_speech.recipe.arguments import count
from bounded_kv_speech.recipe.judge import Judge, word_error_rate
from bounded_kv_speech.recipe.pack import samples_of
from bounded_kv_speech.speak import Sampling, Speaker
from bounded_kv_speech.turns import given
from bounded_kv_speech.voice import source_of, voice_of

CANDIDATES = 6
"""Samples of a voice."""
ROUNDS = (12, 12, 24)
"""Sentences that each sample which is left says in a round."""
AT_ONCE = 16


@dataclass
class Candidate:
    """A sample of a voice, and how what it said was understood."""

    name: str
    codes: NDArray[np.int64]
    heard: list[tuple[str, str]] = field(default_factory=list)
    """What was said, and what the judge wrote."""

    @property
    def error_rate(self) -> float:
        """Of words, over all it has said."""
        return word_error_rate(self.heard)


def main(argv: list[str] | None = None) -> int:
    """Choose, and write the package's voices anew."""
    parser = argparse.ArgumentParser(prog="python -m bounded_kv_speech.recipe.choose")
    parser.add_argument("--work", type=Path, required=True, help="folder with the texts")
    parser.add_argument("--package", type=Path, default=BUILT_IN, help="(%(default)s)")
    parser.add_argument("--processes", type=count, default=2, help="of the judge's (%(default)s)")
    args = parser.parse_args(argv)
    package = Package.load(args.package)
    seen, unseen = text.load(args.work)
    if len(unseen) < sum(ROUNDS):
        parser.error(f"{args.work} has {len(unseen)} sentences; {sum(ROUNDS)} are needed")
    samples = samples_of(teacher.Teacher(), seen, CANDIDATES)
    candidates = [
        Candidate(name, voice_of(each, package.codec.encoder))
        for name, some in samples.items()
        for each in some
    ]
    with ProcessPoolExecutor(args.processes, get_context("spawn"), _begin) as judges:
        chosen = asyncio.run(_choose(package, candidates, unseen, judges))
    save_voices(args.package, {name: best.codes for name, best in chosen.items()})
    write_sums(args.package)
    return 0


async def _choose(
    package: Package, candidates: list[Candidate], unseen: list[str], judges: ProcessPoolExecutor
) -> dict[str, Candidate]:
    llm = AsyncLLM.from_engine_args(package.engine_args(AT_ONCE))
    left = {name: [c for c in candidates if c.name == name] for name in package.voices}
    try:
        async with Speaker(llm, StreamingDecoder(package.codec.decoder, AT_ONCE)) as speaker:
            first = 0
            for count in ROUNDS:
                some = [each for voice in left.values() for each in voice]
                await _try(speaker, some, unseen[first : first + count], judges)
                first += count
                for name, voice in left.items():
                    voice.sort(key=lambda each: each.error_rate)
                    rates = [round(each.error_rate, 3) for each in voice]
                    print(json.dumps({"voice": name, "sentences": first, "wer": rates}), flush=True)
                    del voice[(len(voice) + 1) // 2 :]
    finally:
        llm.shutdown()
    return {name: voice[0] for name, voice in left.items()}


async def _try(
    speaker: Speaker, some: list[Candidate], sentences: list[str], judges: ProcessPoolExecutor
) -> None:
    """Let each of them say each sentence, and the judge hear it."""
    front_end, gate = FrontEnd(), asyncio.Semaphore(AT_ONCE)
    loop = asyncio.get_running_loop()
    bar = tqdm(total=len(some) * len(sentences), unit=" sentences", file=sys.stderr)

    async def one(number: int, i: int) -> tuple[str, str]:
        utterances = given(front_end.utterances(sentences[i]))
        voice = source_of(some[number].codes)
        async with gate:
            said = speaker.speak(f"{number}-{i}", voice, utterances, Sampling(seed=i))
            sound = np.concatenate([each.samples async for each in said])
        written = await loop.run_in_executor(judges, _hear, sound)
        bar.update()
        return sentences[i], written

    with bar:
        heard = await asyncio.gather(
            *(one(number, i) for number in range(len(some)) for i in range(len(sentences)))
        )
    for number, each in enumerate(some):
        each.heard += heard[number * len(sentences) : (number + 1) * len(sentences)]


_judge: Judge


def _begin() -> None:
    """What a process of the judge's is given once."""
    global _judge
    _judge = Judge()


def _hear(samples: Floats) -> str:
    return _judge.hear(samples)


if __name__ == "__main__":
    sys.exit(main())
