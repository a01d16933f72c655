"""What a slow listener has left behind is decoded in small steps, between those of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from bounded_kv_speech.frames import CODE_SAMPLES, Floats
from bounded_kv_speech.speak import Speaker
from bounded_kv_speech.tokens import END, FIRST_CODE, SPEECH, TEXT, VOICE
from bounded_kv_speech.turns import given

LATE, LIVELY = 400, 5
MOST_AT_ONCE = 8
UTTERANCE = [TEXT, *[9] * 20, SPEECH]


class Engine:
    """Gives all of a stream's tokens as one piece, or one by one."""

    async def generate(
        self, pieces: AsyncIterable[Any], params: Any, name: str
    ) -> AsyncGenerator[SimpleNamespace]:
        count = LATE if name == "late" else LIVELY
        async for _ in pieces:
            tokens = [*range(FIRST_CODE, FIRST_CODE + count), END]
            size = len(tokens) if name == "late" else 1
            for at in range(0, len(tokens), size):
                part = SimpleNamespace(token_ids=tokens[at : at + size], finish_reason=None)
                yield SimpleNamespace(outputs=[part])


class Decoder:
    """Says of each code its number, and remembers its steps."""

    max_streams = 2

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self.num_open = 0

    def open(self, name: str, seed: int) -> None:
        self.num_open += 1

    def close(self, name: str) -> None:
        self.num_open -= 1

    def step(self, tokens: Mapping[str, Sequence[int]]) -> dict[str, Floats]:
        self.steps.append({name: len(given) for name, given in tokens.items()})
        codes = {
            name: np.array([t for t in given if t >= FIRST_CODE]) for name, given in tokens.items()
        }
        return {
            name: np.repeat(each, CODE_SAMPLES).astype(np.float32) for name, each in codes.items()
        }


def test_nobody_waits_for_what_another_has_not_taken() -> None:
    decoder = Decoder()

    async def say(speaker: Speaker, name: str) -> tuple[Floats, list[int]]:
        said = [each async for each in speaker.speak(name, [VOICE], given([UTTERANCE]))]
        return np.concatenate([each.samples for each in said]), [t for e in said for t in e.tokens]

    async def run() -> list[tuple[Floats, list[int]]]:
        async with Speaker(Engine(), decoder) as speaker:  # type: ignore[arg-type]
            return await asyncio.gather(say(speaker, "late"), say(speaker, "lively"))

    (sound, tokens), (other, _) = asyncio.run(run())
    assert max(max(step.values()) for step in decoder.steps) <= MOST_AT_ONCE
    assert [step["late"] for step in decoder.steps if "late" in step][:3] == [2, 4, 4]
    assert tokens == [*range(FIRST_CODE, FIRST_CODE + LATE), END]
    assert np.array_equal(sound[::CODE_SAMPLES], tokens[:-1])
    assert len(other) == LIVELY * CODE_SAMPLES
    last = max(i for i, step in enumerate(decoder.steps) if "lively" in step)
    assert last <= LIVELY + 2, "it has waited for the other"
    assert decoder.num_open == 0
