"""Sentences by the teacher, through the codec and through the whole system: are they understood?"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.voice.sound import Likeness, Scale
from benchmarks.voice.spoken import Spoken, speak
from bounded_kv_speech.decode import decode_at_once
from bounded_kv_speech.frames import CODE_RATE, Floats
from bounded_kv_speech.front_end import FrontEnd
from bounded_kv_speech.package import Package
from bounded_kv_speech.recipe.gate import resynthesised
from bounded_kv_speech.recipe.judge import Judge, word_error_rate
from bounded_kv_speech.recipe.teacher import BUILT_IN, Teacher
from bounded_kv_speech.recipe.utterances import write
from bounded_kv_speech.speak import Sampling, Speaker
from bounded_kv_speech.tokens import FIRST_CODE

KINDS = ("teacher", "codec", "system")
LONGEST = 1.5
"""Times the teacher's duration: more of it is babble."""


@dataclass
class Heard:
    """A sentence, and what the judge made of it."""

    text: str
    spoken: Spoken
    written: dict[str, str]
    """By kind."""
    teacher_codes: int
    """How long the teacher takes, its silences cut as those the model learned from."""


async def say_all(
    speaker: Speaker,
    package: Package,
    sentences: Sequence[str],
    voices: Sequence[str],
    sampling: Sampling,
    at_once: int,
) -> list[Spoken]:
    """Each sentence in a stream of its own, in the voice of its place, some at once."""
    front_end, gate = FrontEnd(), asyncio.Semaphore(at_once)
    bar = tqdm(total=len(sentences), unit=" sentences", file=sys.stderr, desc="speaking")

    async def one(i: int) -> Spoken:
        voice = voices[i % len(voices)]
        async with gate:
            chosen = Sampling(sampling.temperature, sampling.top_k, seed=i)
            spoken = await speak(
                speaker,
                f"sentence-{i}",
                (voice, package.voices[voice]),
                front_end.utterances(sentences[i]),
                chosen,
            )
        bar.update()
        return spoken

    with bar:
        return await asyncio.gather(*map(one, range(len(sentences))))


def hear_all(package: Package, sentences: Sequence[str], spoken: Sequence[Spoken]) -> list[Heard]:
    """What the judge writes of each, as the teacher says it, as the codec does, and as spoken."""
    teacher, judge = Teacher(), Judge()
    found = []
    pairs = list(zip(sentences, spoken, strict=True))
    for i, (text, each) in enumerate(tqdm(pairs, unit=" sentences", file=sys.stderr, desc="judge")):
        said = [
            teacher.say(phonemes, BUILT_IN[each.voice], i) for phonemes in teacher.phonemes(text)
        ]
        sounds: dict[str, Floats] = {
            "teacher": np.concatenate([u.samples for u in said]),
            "codec": np.concatenate([resynthesised(package.codec, u, marked=True) for u in said]),
            "system": each.samples,
        }
        written = {kind: judge.hear(sounds[kind]) for kind in KINDS}
        codes = sum(int((write(u, package.codec.encoder) >= FIRST_CODE).sum()) for u in said)
        found.append(Heard(text, each, written, codes))
    return found


def error_rates(heard: Sequence[Heard]) -> dict[str, dict[str, float]]:
    """Word error rates by voice, and of all, by kind."""
    by_voice: dict[str, list[Heard]] = {}
    for each in heard:
        by_voice.setdefault(each.spoken.voice, []).append(each)
    return {
        name: {
            kind: round(word_error_rate((h.text, h.written[kind]) for h in some), 3)
            for kind in KINDS
        }
        for name, some in [*by_voice.items(), ("all", list(heard))]
    }


def order(heard: Sequence[Heard]) -> dict[str, Any]:
    """Whether sentences were said to their ends, in order and in time."""
    ratios = [h.spoken.audio_s * CODE_RATE / h.teacher_codes for h in heard]
    return {
        "sentences": len(heard),
        "in_order": sum(h.spoken.is_in_order for h in heard),
        "duration_over_teacher": {
            "median": round(float(np.median(ratios)), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        },
        f"longer_than_{LONGEST:g}": sum(ratio > LONGEST for ratio in ratios),
    }


def likeness(package: Package, heard: Sequence[Heard]) -> dict[str, float]:
    """Share of sentences that sound more like their own voice's prompt than like any other's."""
    prompts = {
        name: Likeness.of(decode_at_once(package.codec.decoder, tokens[1:]))
        for name, tokens in package.voices.items()
    }
    scale = Scale.among(list(prompts.values()))
    hits: dict[str, list[bool]] = {}
    for each in heard:
        sounds_like = Likeness.of(each.spoken.samples)
        to = {name: scale.distances(sounds_like, prompt) for name, prompt in prompts.items()}
        for by in to[each.spoken.voice]:
            nearest = min(to, key=lambda name, by=by: to[name][by])  # type: ignore[misc]
            hits.setdefault(by, []).append(nearest == each.spoken.voice)
    return {by: round(float(np.mean(found)), 3) for by, found in hits.items()}
