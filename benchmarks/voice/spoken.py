"""What streams say through vLLM, and what was asked of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from vllm.v1.engine.async_llm import AsyncLLM

from bounded_kv_speech.decode import StreamingDecoder
from bounded_kv_speech.frames import CODE_SAMPLES, SAMPLE_RATE, Floats
from bounded_kv_speech.package import Package
from bounded_kv_speech.speak import Said, Sampling, Speaker, by_utterance
from bounded_kv_speech.tokens import FIRST_CODE
from bounded_kv_speech.turns import given
from vllm_bounded_kv.engine.endpoint import fetch_figures
from vllm_bounded_kv.engine.replicas import all_figures


@dataclass
class Spoken:
    """One stream's utterances and sound."""

    voice: str
    utterances: list[list[int]]
    """As given, `TEXT` first and `SPEECH` last."""
    said: list[Said] = field(default_factory=list)
    first_s: float = 0.0
    """From its start to its first sound."""
    took_s: float = 0.0

    @cached_property
    def samples(self) -> Floats:
        """All of its sound."""
        return np.concatenate([said.samples for said in self.said])

    @cached_property
    def tokens(self) -> list[list[int]]:
        """Of each utterance that came to its end, without it."""
        return by_utterance(self.said)[:-1]

    @property
    def phones(self) -> list[list[int]]:
        """Of each utterance, as they were said."""
        return [[t for t in tokens if t < FIRST_CODE] for tokens in self.tokens]

    @property
    def ends(self) -> NDArray[np.int64]:
        """Sample at which each utterance's sound ends."""
        codes = [sum(t >= FIRST_CODE for t in tokens) for tokens in self.tokens]
        return np.cumsum(codes) * CODE_SAMPLES

    @property
    def audio_s(self) -> float:
        """Seconds of sound."""
        return len(self.samples) / SAMPLE_RATE

    @property
    def is_in_order(self) -> bool:
        """Whether each utterance was said to its end, no phone skipped or said twice."""
        return self.phones == [utterance[1:-1] for utterance in self.utterances]


@asynccontextmanager
async def speaking(package: Package, max_streams: int) -> AsyncIterator[tuple[AsyncLLM, Speaker]]:
    """An engine and its speaker."""
    llm = AsyncLLM.from_engine_args(package.engine_args(max_streams))
    try:
        async with Speaker(llm, StreamingDecoder(package.codec.decoder, max_streams)) as speaker:
            yield llm, speaker
    finally:
        llm.shutdown()


async def speak(
    speaker: Speaker,
    name: str,
    voice: tuple[str, Sequence[int]],
    utterances: list[list[int]],
    sampling: Sampling,
) -> Spoken:
    """One stream, from its first utterance to the end of its last."""
    spoken = Spoken(voice[0], utterances)
    start = time.perf_counter()

    async for said in speaker.speak(name, voice[1], given(utterances), sampling):
        spoken.said.append(said)
        spoken.took_s = time.perf_counter() - start
        if len(said.samples) and not spoken.first_s:
            spoken.first_s = spoken.took_s
    return spoken


async def block_count(llm: AsyncLLM, name: str) -> int | None:
    """Blocks that the stream of this name holds; None when it has no slot."""
    shown = all_figures(await fetch_figures(llm))
    held = [each["blocks"] for each in shown["streams"] if each["request_id"].startswith(name)]
    return int(held[0]) if held else None


async def watch(llm: AsyncLLM, name: str, blocks: list[int], every_s: float) -> None:
    """Append the blocks that a stream holds, until cancelled."""
    while True:
        count = await block_count(llm, name)
        if count is not None:
            blocks.append(count)
        await asyncio.sleep(every_s)
