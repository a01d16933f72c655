"""Five minutes of text in one stream, its last minute the same words as its first."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.voice.sound import Likeness
from benchmarks.voice.spoken import Spoken, speak, watch
from bounded_kv_speech.frames import SAMPLE_RATE, Floats
from bounded_kv_speech.front_end import FrontEnd
from bounded_kv_speech.package import Package
from bounded_kv_speech.recipe.judge import Judge, word_error_rate
from bounded_kv_speech.speak import Sampling, Speaker

WATCH_S = 0.2


@dataclass
class Endless:
    """What was said, sentence by sentence, and the blocks held meanwhile."""

    texts: list[str]
    spoken: Spoken
    blocks: list[int]

    def sounds(self) -> list[Floats]:
        """Of each sentence."""
        return np.split(self.spoken.samples, self.spoken.ends[:-1])


def there_and_back(sentences: Sequence[str], first: int) -> list[str]:
    """All sentences, then the first of them once more."""
    return [*sentences, *sentences[:first]]


async def say(
    llm: AsyncLLM,
    speaker: Speaker,
    package: Package,
    texts: list[str],
    voice: str,
    sampling: Sampling,
) -> Endless:
    """Say the sentences in one stream.

    Raises:
        ValueError: a sentence is more than one utterance.
    """
    front_end = FrontEnd()
    utterances = [front_end.utterances(text) for text in texts]
    for text, found in zip(texts, utterances, strict=True):
        if len(found) != 1:
            raise ValueError(f"{text!r}: is {len(found)} utterances; must be one")
    name, blocks = f"endless-{sampling.seed}", list[int]()
    watching = asyncio.create_task(watch(llm, name, blocks, WATCH_S))
    try:
        one_each = [found[0] for found in utterances]
        spoken = await speak(speaker, name, (voice, package.voices[voice]), one_each, sampling)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return Endless(texts, spoken, blocks)


def judged(streams: Sequence[Endless], first: int) -> dict[str, Any]:
    """Word error rate and pitch of one stream's first sentences, and of the same at its end; and
    the word error rate at either end of all streams together.
    """
    judge, whole = Judge(), streams[0]
    pairs = [
        (text, judge.hear(sound))
        for text, sound in zip(
            tqdm(whole.texts, unit=" sentences", file=sys.stderr, desc="judge"),
            whole.sounds(),
            strict=True,
        )
    ]
    ends = {"first": pairs[:first], "last": pairs[-first:]}
    for stream in tqdm(streams[1:], unit=" streams", file=sys.stderr, desc="judge"):
        said = list(zip(stream.texts, stream.sounds(), strict=True))
        for name, part in (("first", said[:first]), ("last", said[-first:])):
            ends[name] = ends[name] + [(text, judge.hear(sound)) for text, sound in part]
    return {
        "five_minutes": _one(whole, pairs, first),
        "at_either_end": {
            "streams": len(streams),
            "wer": {name: round(word_error_rate(of), 3) for name, of in ends.items()},
        },
    }


def _one(endless: Endless, pairs: Sequence[tuple[str, str]], first: int) -> dict[str, Any]:
    octaves = [Likeness.of(sound).octaves for sound in endless.sounds()]
    parts = {"first": slice(0, first), "last": slice(-first, None), "all": slice(None)}
    return {
        "seconds": round(endless.spoken.audio_s, 1),
        "sentences": len(pairs),
        "sentences_at_either_end": first,
        "in_order": endless.spoken.is_in_order,
        "blocks": sorted(set(endless.blocks)),
        "readings_of_blocks": len(endless.blocks),
        "wer": {name: round(word_error_rate(pairs[part]), 3) for name, part in parts.items()},
        "median_octaves": {
            name: round(float(np.median(octaves[part])), 3) for name, part in parts.items()
        },
        # By minutes of sound, each against the whole.
        "octaves_by_minute": [
            round(value, 3) for value in _by_minute(endless.spoken.ends / SAMPLE_RATE, octaves)
        ],
        "octaves": [round(value, 3) for value in octaves],
        "ends_s": [round(float(end), 2) for end in endless.spoken.ends / SAMPLE_RATE],
    }


def _by_minute(ends_s: np.ndarray, octaves: list[float]) -> list[float]:
    minutes = (ends_s // 60).astype(int)
    values = np.asarray(octaves)
    return [float(np.median(values[minutes == m])) for m in np.unique(minutes)]
