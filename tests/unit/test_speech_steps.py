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
MOST_AT_ONCE = 16
UTTERANCE = [TEXT, *[9] * 20, SPEECH]


class Engine:
    """A token of each stream in a step, or all of the late one's; what nobody takes gathers."""

    def __init__(self, lively: int, step_s: float) -> None:
        self.lively, self.step_s = lively, step_s

    async def generate(
        self, pieces: AsyncIterable[Any], params: Any, name: str
    ) -> AsyncGenerator[SimpleNamespace]:
        async for _ in pieces:
            count = LATE if name == "late" else self.lively
            left = [*range(FIRST_CODE, FIRST_CODE + count), END]
            start = asyncio.get_running_loop().time()
            while left:
                await asyncio.sleep(self.step_s)
                made = (asyncio.get_running_loop().time() - start) / self.step_s
                size = len(left) if name == "late" else max(1, round(made) + len(left) - count - 1)
                part = SimpleNamespace(token_ids=left[:size], finish_reason=None)
                left = left[size:]
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
        async with Speaker(Engine(LIVELY, 0.001), decoder) as speaker:  # type: ignore[arg-type]
            return await asyncio.gather(say(speaker, "late"), say(speaker, "lively"))

    (sound, tokens), (other, _) = asyncio.run(run())
    assert max(max(step.values()) for step in decoder.steps) <= MOST_AT_ONCE
    assert tokens == [*range(FIRST_CODE, FIRST_CODE + LATE), END]
    assert np.array_equal(sound[::CODE_SAMPLES], tokens[:-1])
    assert len(other) == LIVELY * CODE_SAMPLES
    between = [i for i, step in enumerate(decoder.steps) if "lively" in step and i]
    assert between[0] < LATE / MOST_AT_ONCE / 2, "it has waited for the other"
    assert decoder.num_open == 0


def test_streams_are_decoded_together() -> None:
    """Each has its first code at once; then, what all have by then is one step."""
    decoder, count = Decoder(), 40
    decoder.max_streams = 3
    names = ["a", "b", "c"]

    async def say(speaker: Speaker, name: str) -> int:
        return sum(
            [len(each.samples) async for each in speaker.speak(name, [VOICE], given([UTTERANCE]))]
        )

    async def run() -> list[int]:
        async with Speaker(Engine(count, 0.01), decoder) as speaker:  # type: ignore[arg-type]
            return await asyncio.gather(*(say(speaker, name) for name in names))

    assert asyncio.run(run()) == [count * CODE_SAMPLES] * 3
    assert sum(len(step) for step in decoder.steps) > 1.5 * len(decoder.steps), "one by one"
    assert len(decoder.steps) < count / 2, "code by code"
