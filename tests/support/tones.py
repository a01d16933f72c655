"""A speech model without an engine: each utterance is a tone. For what lies around a model.

What a text says can make it fail, pause or go on for ever, where a real model would need an
accident. It counts the streams that are open.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bounded_kv_server.profile import Chosen, Chunk, Floats

RATE = 24_000
CHUNK = RATE // 40
WORD_CHUNKS = 4
"""A word takes a tenth of a second."""
FAIL, PAUSE, FOREVER, SILENT = 1001, 1002, 1003, 1004
_SPECIAL = {"fail": FAIL, "pause": PAUSE, "forever": FOREVER, "silent": SILENT}


class Tones:
    """A `SpeechModel`; voices and seeds have pitches of their own."""

    rate = RATE
    longest_s = 1.0
    takes_instructions = False
    voice_kind = "tones"

    def __init__(self, chunk_s: float = 0.0, pause_s: float = 0.3) -> None:
        self.voices = {"low": [10, 11], "high": [20, 21]}
        self.chunk_s, self.pause_s = chunk_s, pause_s
        self.num_open = self.num_opened = self.num_texts = 0
        self.is_started = False

    async def start(self) -> None:
        self.is_started = True

    def utterances(self, text: str) -> list[list[int]]:
        self.num_texts += 1
        found = []
        for sentence in re.findall(r"[^.!?]+", text):
            words = re.findall(r"[a-z]+", sentence.lower())
            if words:
                found.append([_SPECIAL.get(word, len(word)) for word in words])
        return found

    def voice_of(self, samples: Floats) -> NDArray[np.int64]:
        if not np.abs(samples).max() > 0.01:
            raise ValueError("there is no sound in it")
        return np.array([int(1000 * np.abs(samples).mean())])

    def source_of(self, codes: NDArray[np.int64]) -> list[int]:
        return [30, *codes.tolist()]

    async def speak(
        self,
        name: str,
        voice: Sequence[int],
        utterances: AsyncIterable[Sequence[int]],
        chosen: Chosen,
    ) -> AsyncGenerator[Chunk]:
        self.num_open += 1
        self.num_opened += 1
        try:
            pitch, at = 100.0 + sum(voice) + 7 * (chosen.seed or 0), 0
            async for utterance in utterances:
                for word in utterance:
                    if word == FAIL:
                        raise RuntimeError("the engine has failed")
                    if word == PAUSE:
                        await asyncio.sleep(self.pause_s)
                    count = 0 if word == SILENT else WORD_CHUNKS
                    while word == FOREVER or count:
                        count -= 1
                        times = (at + np.arange(CHUNK)) / RATE
                        at += CHUNK
                        if self.chunk_s:
                            await asyncio.sleep(self.chunk_s)
                        yield Chunk((0.2 * np.sin(2 * np.pi * pitch * times)).astype("f4"), 1, 0)
                yield Chunk(np.zeros(0, np.float32), 1, 1)
        finally:
            await asyncio.sleep(0.01)  # what is closed may have to be waited for
            self.num_open -= 1


class NoPins:
    """Counts what would be pinned."""

    def __init__(self) -> None:
        self.pinned: list[list[int]] = []

    async def use(self, tokens: list[int]) -> None:
        self.pinned.append(tokens)

    async def drop(self, tokens: list[int]) -> None:
        self.pinned = [pinned for pinned in self.pinned if pinned != tokens]
