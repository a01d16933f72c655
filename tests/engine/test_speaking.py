"""The embedded voice through vLLM: streams of utterances, in order, each alone as in company.

The weights are random: what is tested is that nothing is skipped, mixed up or lost on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from bounded_kv_speech.codec import CodecConfig, Decoder
from bounded_kv_speech.decode import StreamingDecoder, decode_at_once
from bounded_kv_speech.frames import NUM_HARMONIC, NUM_NOISE
from bounded_kv_speech.lm import SINK, export
from bounded_kv_speech.recipe.train_lm import Voice
from bounded_kv_speech.speak import Said, Sampling, Speaker, by_utterance
from bounded_kv_speech.tokens import FIRST_CODE, FIRST_PHONE, SPEECH, TEXT, VOCAB_SIZE, VOICE
from support.async_engine import figures, running_llm, running_loop

STEP_16_BITS = 1 / 32768
MAX_STREAMS = 3


@dataclass
class Stream:
    """What a stream was given, and what came of it."""

    seed: int
    phones: list[list[int]]
    said: list[Said] = field(default_factory=list)

    @property
    def voice(self) -> list[int]:
        codes = np.random.default_rng(self.seed).integers(FIRST_CODE, VOCAB_SIZE, SINK - 1)
        return [VOICE, *codes.tolist()]

    @property
    def utterances(self) -> list[list[int]]:
        """Tokens of each, as they were sampled."""
        found = by_utterance(self.said)
        assert not found.pop()
        return found

    @property
    def samples(self) -> np.ndarray:
        return np.concatenate([said.samples for said in self.said])


def streams() -> list[Stream]:
    rng = np.random.default_rng(5)
    return [
        Stream(seed, [rng.integers(FIRST_PHONE, FIRST_CODE, size=n).tolist() for n in lengths])
        for seed, lengths in enumerate([(3, 2, 1), (1, 3), (2, 2, 1)])
    ]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with running_loop() as loop:
        yield loop


@pytest.fixture(scope="module")
def llm(
    tmp_path_factory: pytest.TempPathFactory, loop: asyncio.AbstractEventLoop
) -> Iterator[AsyncLLM]:
    folder = tmp_path_factory.mktemp("voice")
    torch.manual_seed(0)
    export(folder, Voice().weights())
    args = AsyncEngineArgs(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=100_000,
        max_num_seqs=MAX_STREAMS,
        kv_cache_memory_bytes=64 << 20,
        logits_processors=["bounded_kv_speech.order:PhoneOrder"],
        additional_config={"kv_plugin": "bounded"},
    )
    with running_llm(loop, args) as llm:
        yield llm


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(CodecConfig(width=32, decoder_layers=2, heads=2))
    decoder.mean[: NUM_HARMONIC + NUM_NOISE] = -5.0
    decoder.mean[-2:] = torch.tensor([5.0, 0.5])
    return decoder


async def listen(speaker: Speaker, name: str, stream: Stream) -> None:
    async def utterances() -> AsyncGenerator[list[int]]:
        for phones in stream.phones:
            yield [TEXT, *phones, SPEECH]

    sampling = Sampling(temperature=1.0, top_k=0, seed=stream.seed)
    async for said in speaker.speak(name, stream.voice, utterances(), sampling):
        stream.said.append(said)


@pytest.fixture(scope="module")
def together(llm: AsyncLLM, decoder: Decoder, loop: asyncio.AbstractEventLoop) -> list[Stream]:
    """Three streams at once."""
    found = streams()

    async def run() -> None:
        async with Speaker(llm, StreamingDecoder(decoder, MAX_STREAMS)) as speaker:
            await asyncio.gather(
                *(listen(speaker, f"s{i}", stream) for i, stream in enumerate(found))
            )

    loop.run_until_complete(run())
    return found


def test_each_phone_is_said_once_and_in_order(together: list[Stream]) -> None:
    for stream in together:
        said = [[t for t in tokens if t < FIRST_CODE] for tokens in stream.utterances]
        assert said == stream.phones


def test_the_sound_is_that_of_the_tokens(together: list[Stream], decoder: Decoder) -> None:
    """Nothing lost or doubled, and each utterance's first silence known as such."""
    for stream in together:
        tokens = [token for said in stream.utterances for token in (SPEECH, *said)]
        whole = decode_at_once(decoder, tokens, stream.seed)
        assert len(stream.samples) == len(whole)
        assert np.abs(stream.samples - whole).max() < STEP_16_BITS


def test_a_stream_alone_sounds_the_same(
    together: list[Stream], llm: AsyncLLM, decoder: Decoder, loop: asyncio.AbstractEventLoop
) -> None:
    alone = streams()[0]

    async def run() -> dict[str, Any]:
        async with Speaker(llm, StreamingDecoder(decoder, 1)) as speaker:
            await listen(speaker, "alone", alone)
        return await figures(llm)

    shown = loop.run_until_complete(run())
    assert alone.utterances == together[0].utterances
    assert np.abs(alone.samples - together[0].samples).max() < STEP_16_BITS
    assert shown["slots_used"] == 0


def test_a_stream_too_many_or_twice_is_refused(
    llm: AsyncLLM, decoder: Decoder, loop: asyncio.AbstractEventLoop
) -> None:
    """And one that is left in the middle gives everything back."""

    async def run() -> dict[str, Any]:
        async with Speaker(llm, StreamingDecoder(decoder, 1)) as speaker:
            stream = streams()[0]

            async def forever() -> AsyncGenerator[list[int]]:
                while True:
                    yield [TEXT, FIRST_PHONE, SPEECH]
                    await asyncio.sleep(0.1)

            first = speaker.speak("a", stream.voice, forever())
            await anext(first)
            with pytest.raises(ValueError, match="open already"):
                await anext(speaker.speak("a", stream.voice, forever()))
            with pytest.raises(RuntimeError, match="max_streams 1"):
                await anext(speaker.speak("b", stream.voice, forever()))
            await first.aclose()
            await listen(speaker, "a", stream)
            assert len(stream.utterances) == len(stream.phones)
            for _ in range(100):
                shown = await figures(llm)
                if not shown["slots_used"]:
                    break
                await asyncio.sleep(0.05)
        return shown

    assert loop.run_until_complete(run())["slots_used"] == 0
