"""The voice that is built in: `make eval-voice` in short, and nothing of the teacher's sound."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.voice import endless, words
from benchmarks.voice.spoken import Spoken, speak
from benchmarks.voice.texts import sentences
from bounded_kv_speech.decode import StreamingDecoder, decode_at_once
from bounded_kv_speech.front_end import FrontEnd
from bounded_kv_speech.package import BUILT_IN, Package
from bounded_kv_speech.recipe.judge import Judge, word_error_rate
from bounded_kv_speech.recipe.teacher import Teacher
from bounded_kv_speech.speak import Sampling, Speaker
from bounded_kv_speech.tokens import END, SPEECH
from support.async_engine import running_llm, running_loop

SENTENCES, STREAMS = 10, 4
IN_A_ROW = 8
MAX_BYTES = 20_000_000
WER = 0.5
"""Far above what 100 sentences show, far below what babble would."""
LIKE = 0.7
"""Share of the sentences nearest to their own voice; by chance it is a fifth."""
STEP_16_BITS = 1 / 32768


@pytest.fixture(scope="module")
def package() -> Package:
    return Package.load()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with running_loop() as loop:
        yield loop


@pytest.fixture(scope="module")
def llm(package: Package, loop: asyncio.AbstractEventLoop) -> Iterator[AsyncLLM]:
    with running_llm(loop, package.engine_args(STREAMS)) as llm:
        yield llm


@pytest.fixture(scope="module", autouse=True)
def mute_teacher() -> Iterator[None]:
    """The teacher's synthesis raises, wherever it is called from; its words stay."""

    def raising(*_: object, **__: object) -> None:
        raise AssertionError("the teacher has been asked to speak")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("synth", "pulses"):
            patch.setattr(f"hibari.dsp.{name}", raising)
        patch.setattr("onnxruntime.InferenceSession", raising)
        with pytest.raises(AssertionError, match="asked to speak"):
            Teacher()
        yield


@pytest.fixture(scope="module")
def spoken(package: Package, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> list[Spoken]:
    async def run() -> list[Spoken]:
        async with Speaker(llm, StreamingDecoder(package.codec.decoder, STREAMS)) as speaker:
            return await words.say_all(
                speaker, package, sentences()[:SENTENCES], list(package.voices), Sampling(), STREAMS
            )

    return loop.run_until_complete(run())


def test_every_phone_is_said_once_and_in_order(spoken: list[Spoken]) -> None:
    assert all(each.is_in_order for each in spoken)
    assert all(0.8 < each.audio_s < 8 for each in spoken)


def test_it_is_understood(spoken: list[Spoken]) -> None:
    judge = Judge()
    pairs = [
        (text, judge.hear(each.samples))
        for text, each in zip(sentences()[:SENTENCES], spoken, strict=True)
    ]
    assert word_error_rate(pairs) < WER, pairs


def test_it_sounds_like_the_voice_that_was_asked_for(
    package: Package, spoken: list[Spoken]
) -> None:
    texts = sentences()[:SENTENCES]
    heard = [words.Heard(text, each, {}, 0) for text, each in zip(texts, spoken, strict=True)]
    found = words.likeness(package, heard)
    assert min(found.values()) >= LIKE, found


def test_alone_it_is_the_same(
    package: Package, llm: AsyncLLM, loop: asyncio.AbstractEventLoop, spoken: list[Spoken]
) -> None:
    """Tokens, and samples to within a step of 16 bits."""

    async def run() -> Spoken:
        async with Speaker(llm, StreamingDecoder(package.codec.decoder, 1)) as speaker:
            voice = list(package.voices)[2]
            return await speak(
                speaker,
                "alone",
                (voice, package.voices[voice]),
                FrontEnd().utterances(sentences()[2]),
                Sampling(seed=2),
            )

    alone = loop.run_until_complete(run())
    assert alone.tokens == spoken[2].tokens
    assert np.abs(alone.samples - spoken[2].samples).max() < STEP_16_BITS
    tokens = [SPEECH, *(t for said in alone.said for t in said.tokens if t != END)]
    whole = decode_at_once(package.codec.decoder, tokens, 2)
    assert np.abs(alone.samples - whole).max() < STEP_16_BITS


def test_a_stream_goes_on_in_as_many_blocks(
    package: Package, llm: AsyncLLM, loop: asyncio.AbstractEventLoop
) -> None:
    """Well past its window of tokens, in the pitch it began with."""

    async def run() -> endless.Endless:
        async with Speaker(llm, StreamingDecoder(package.codec.decoder, 1)) as speaker:
            return await endless.say(
                llm, speaker, package, sentences()[:IN_A_ROW], "sage", Sampling(seed=1)
            )

    long = loop.run_until_complete(run())
    found = endless.judged([long], 3)["five_minutes"]
    assert found["in_order"]
    assert sum(map(len, long.spoken.tokens)) > 800
    assert len(found["blocks"]) == 1
    assert np.abs(np.array(found["octaves"]) - found["median_octaves"]["all"]).max() < 0.25


def test_the_weights_are_those_of_the_card() -> None:
    listed = dict(
        reversed(line.split("  ", 1)) for line in (BUILT_IN / "SHA256SUMS").read_text().splitlines()
    )
    files = {
        str(path.relative_to(BUILT_IN)): path
        for path in BUILT_IN.rglob("*")
        if path.suffix == ".safetensors"
    }
    assert listed.keys() == files.keys()
    for name, path in files.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == listed[name]
    assert sum(path.stat().st_size for path in BUILT_IN.rglob("*") if path.is_file()) < MAX_BYTES


def test_at_least_four_voices_come_with_it(package: Package) -> None:
    assert len(package.voices) >= 4
    assert len({tuple(tokens) for tokens in package.voices.values()}) == len(package.voices)
