"""`python -m benchmarks.voice.speed`: real-time factors on one core, and where a step's time goes.

Everything, vLLM's processes included, is bound to one core. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch counts its cores
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_CUSTOM_SCOPES_FOR_PROFILING"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
from vllm.config import ProfilerConfig
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.server_processes import usage
from benchmarks.voice.spoken import Spoken, speak
from benchmarks.voice.texts import sentences
from bounded_kv_speech.decode import StreamingDecoder
from bounded_kv_speech.frames import Floats
from bounded_kv_speech.front_end import FrontEnd
from bounded_kv_speech.package import BUILT_IN, Package
from bounded_kv_speech.speak import Sampling, Speaker

STREAMS = (1, 4, 8, 16)
EACH = 4
"""Sentences of a stream."""
SCOPE = "gpu_model_runner: "
"""What vLLM's own names of a step's parts begin with, on CPUs too."""


class _Timed(StreamingDecoder):
    """Counts the time that it takes."""

    seconds = 0.0

    def step(self, tokens: Mapping[str, Sequence[int]]) -> dict[str, Floats]:
        start = time.perf_counter()
        try:
            return super().step(tokens)
        finally:
            self.seconds += time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.voice.speed", description=__doc__)
    parser.add_argument("--package", type=Path, default=BUILT_IN)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--compiled", action="store_true", help="by vLLM: a minute at the start")
    args = parser.parse_args(argv)
    if min(args.streams) < 1:
        parser.error(f"--streams {min(args.streams)}: must be at least 1")
    print(
        json.dumps(asyncio.run(_measure(Package.load(args.package), args.streams, args.compiled)))
    )
    return 0


async def _measure(package: Package, counts: Sequence[int], compiled: bool) -> dict[str, Any]:
    most = max(counts)
    with tempfile.TemporaryDirectory() as folder:
        engine = package.engine_args(most, compiled)
        engine.profiler_config = ProfilerConfig(
            profiler="torch",
            torch_profiler_dir=folder,
            torch_profiler_with_stack=False,
            ignore_frontend=True,  # its profiler crashes now and then, and its steps are not read
        )
        llm = AsyncLLM.from_engine_args(engine)
        try:
            decoder = _Timed(package.codec.decoder, most)
            async with Speaker(llm, decoder) as speaker:
                await _together(package, speaker, most, "warm")
                found = {
                    str(count): await _one(package, speaker, decoder, count) for count in counts
                }
                await llm.start_profile()
                await _together(package, speaker, 1, "profiled")
                await llm.stop_profile()
        finally:
            llm.shutdown()
        return {"streams": found, "parts_of_a_step": _scopes(Path(folder))}


async def _one(package: Package, speaker: Speaker, decoder: _Timed, count: int) -> dict[str, Any]:
    before, decoding = usage(os.getpid()), decoder.seconds
    start = time.perf_counter()
    spoken = await _together(package, speaker, count, f"of-{count}")
    took = time.perf_counter() - start
    cpu = {
        " ".join(name.split()[:-1]): used.cpu_s - before[name].cpu_s
        for name, used in usage(os.getpid()).items()
        if name in before
    }
    cpu["decoder"] = decoder.seconds - decoding
    audio = sum(each.audio_s for each in spoken)
    print(f"{count:3} streams: {took:.1f} s for {audio:.1f} s of sound", file=sys.stderr)
    return {
        "rtf": round(float(np.median([each.took_s / each.audio_s for each in spoken])), 3),
        "worst_rtf": round(max(each.took_s / each.audio_s for each in spoken), 3),
        "first_audio_s": round(float(np.median([each.first_s for each in spoken])), 3),
        "audio_s_per_s": round(audio / took, 2),
        "cpu_s_per_audio_s": {name: round(used / audio, 4) for name, used in cpu.items()},
    }


async def _together(package: Package, speaker: Speaker, count: int, name: str) -> list[Spoken]:
    front_end, voices, texts = FrontEnd(), list(package.voices), sentences()

    def utterances(i: int) -> list[list[int]]:
        return front_end.utterances(
            " ".join(texts[(i * EACH + j) % len(texts)] for j in range(EACH))
        )

    asked = [utterances(i) for i in range(count)]
    return await asyncio.gather(
        *(
            speak(
                speaker,
                f"{name}-{i}",
                (voices[i % len(voices)], package.voices[voices[i % len(voices)]]),
                asked[i],
                Sampling(seed=i),
            )
            for i in range(count)
        )
    )


def _scopes(folder: Path) -> dict[str, float]:
    """Mean milliseconds of each part of a worker's step, by vLLM's names, under the profiler."""
    found: dict[str, list[float]] = {}
    for path in folder.rglob("*.json*"):
        read = gzip.open if path.suffix == ".gz" else open
        with read(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        for event in events:
            name = str(event.get("name"))
            if name.startswith(SCOPE) and "dur" in event:
                found.setdefault(name.removeprefix(SCOPE), []).append(event["dur"] / 1e3)
    return {name: round(float(np.mean(times)), 3) for name, times in found.items()}


if __name__ == "__main__":
    sys.exit(main())
