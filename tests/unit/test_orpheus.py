"""Orpheus' tokens to sound through the real SNAC, small and with random weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from snac import SNAC

from bounded_kv_server.codec_model import CodecModel, FrameReader, Manner
from bounded_kv_server.orpheus import (
    BEGIN_OF_TEXT,
    CODES,
    END_OF_PROMPT,
    PROMPT,
    START,
    orpheus,
    sound_of,
)
from bounded_kv_server.profile import Chosen, Chunk
from bounded_kv_server.snac_codec import CODEBOOK, FRAME_CODES, SnacCodec
from bounded_kv_server.windowed import Reach, Windowed
from bounded_kv_speech.turns import StreamFull, given

NUM_FRAMES = 30
NEAR = 1e-6


@pytest.fixture(scope="module")
def codec() -> SnacCodec:
    torch.manual_seed(0)
    model = SNAC(
        sampling_rate=24_000,
        encoder_dim=8,
        encoder_rates=[2, 4, 8, 8],
        decoder_dim=64,
        decoder_rates=[8, 8, 4, 2],
        attn_window_size=None,
        codebook_size=CODEBOOK,
        vq_strides=[4, 2, 1],
    )
    for parameter in model.decoder.parameters():  # else all but the last bias is lost in tanh
        parameter.data *= 1.5
    return SnacCodec(model.double())  # in float32, sums of other sizes round otherwise


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    return np.random.default_rng(0).integers(CODEBOOK, size=(NUM_FRAMES, FRAME_CODES))


def tokens_of(frames: np.ndarray) -> list[int]:
    return (frames + CODES.first + CODEBOOK * np.arange(FRAME_CODES)).reshape(-1).tolist()


def test_the_decoder_reaches_a_few_frames(codec: SnacCodec) -> None:
    assert 1 <= codec.reach.back <= 4
    assert 1 <= codec.reach.ahead <= 4
    assert (codec.rate, codec.frame_samples) == (24_000, 2048)


@pytest.mark.parametrize("sizes", [[1], [3], [1, 7, 2], [NUM_FRAMES]])
def test_streamed_is_at_once(codec: SnacCodec, frames: np.ndarray, sizes: list[int]) -> None:
    stream = codec.stream(5)
    parts, at, i = [], 0, 0
    while at < NUM_FRAMES:
        parts.append(stream.feed(frames[at : at + sizes[i % len(sizes)]]))
        at += sizes[i % len(sizes)]
        i += 1
        assert len(stream._kept) <= codec.reach.back + codec.reach.ahead + max(sizes)
    parts.append(stream.finish())
    whole = codec.decode(frames, 0, 5)
    assert len(whole) == NUM_FRAMES * codec.frame_samples
    assert whole.std() > 0.01
    assert np.abs(np.concatenate(parts) - whole).max() < NEAR


def test_control_one_frame_less_is_heard(codec: SnacCodec, frames: np.ndarray) -> None:
    whole = codec.decode(frames, 0, 5)
    reach = codec.reach
    for less in (replace(reach, back=reach.back - 1), replace(reach, ahead=reach.ahead - 1)):
        stream = Windowed(lambda f, first: codec.decode(f, first, 5), less)
        parts = [stream.feed(frame[None]) for frame in frames] + [stream.finish()]
        assert np.abs(np.concatenate(parts) - whole).max() > 10 * NEAR


def test_noise_is_the_seeds(codec: SnacCodec, frames: np.ndarray) -> None:
    assert np.array_equal(codec.decode(frames, 0, 1), codec.decode(frames, 0, 1))
    assert not np.allclose(codec.decode(frames, 0, 1), codec.decode(frames, 0, 2))


def test_a_reach_that_is_not_found_is_said() -> None:
    def everything(frames: np.ndarray, first: int) -> np.ndarray:
        return np.full(len(frames) * 2, frames.sum(), np.float32)

    with pytest.raises(ValueError, match="3 frames or more"):
        Reach.of(everything, np.array([[0], [1]]), 3)


def test_other_snacs_are_refused() -> None:
    model = SNAC(encoder_dim=8, decoder_dim=64, vq_strides=[8, 4, 2, 1])
    with pytest.raises(ValueError, match="snac_24khz"):
        SnacCodec(model)


def test_tokens_come_in_any_pieces_and_strays_are_left_out(frames: np.ndarray) -> None:
    tokens = tokens_of(frames)
    tokens[10:10] = [5, CODES.end, CODES.first]
    collected, found = FrameReader(CODES), []
    for at in range(0, len(tokens), 5):
        found.append(collected.add(tokens[at : at + 5]))
    assert np.array_equal(np.concatenate(found), frames)


class Engine:
    """Answers each turn with the next frames; keeps what it was asked.

    `most`: tokens that it gives at a time; None: all turns' at once, as to who takes them late.
    """

    def __init__(self, answers: list[list[int]], most: int | None = 3) -> None:
        self.answers, self.most, self.asked = answers, most, []
        self.salts: list[str | None] = []
        self.max_len = 10**9

    async def generate(self, pieces: Any, params: Any, name: str) -> AsyncGenerator[Any]:
        answers, late = iter(self.answers), []
        async for piece in pieces:
            self.asked.append((piece.prompt["prompt_token_ids"], piece.sampling_params))
            self.salts.append(piece.prompt.get("cache_salt"))
            answer = [*next(answers), CODES.end][: piece.sampling_params.max_tokens]
            answer = answer[: self.max_len]
            reason = "stop" if answer[-1] == CODES.end else "length"
            if self.most is None:
                late += answer
                continue
            for at in range(0, len(answer), self.most):
                is_last = at + self.most >= len(answer)
                yield output(answer[at : at + self.most], reason if is_last else None)
        if late:
            yield output(late, reason)


def output(tokens: list[int], reason: str | None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason=reason)])


class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def said(model: CodecModel, utterances: list[list[int]], chosen: Chosen) -> list[Chunk]:
    async def run() -> list[Chunk]:
        speech = model.speak("a", model.voices["leo"], given(utterances), chosen)
        return [chunk async for chunk in speech]

    return asyncio.run(run())


@pytest.mark.parametrize("most", [3, 1000, None])
def test_an_utterance_as_long_as_may_be_ends_too(
    codec: SnacCodec, frames: np.ndarray, most: int | None
) -> None:
    """In the middle of a frame, of which nothing comes; the next begins one."""
    first, second = [[1, 2], [3, 4, 5, 6, 7]]
    endless = [0, *tokens_of(frames)]  # the first is none of a frame
    engine = Engine([endless, tokens_of(frames[10:14])], most)
    manner = Manner(temperature=0.5, most_frames=3)
    model = CodecModel(engine, Letters(), CODES, PROMPT, manner, sound_of(codec))
    chunks = said(model, [first, second], Chosen(seed=5))
    assert sum(chunk.num_ended for chunk in chunks) == 2
    samples = np.concatenate([chunk.samples for chunk in chunks])
    wanted = [codec.decode(frames[:5], 0, 5), codec.decode(frames[10:14], 0, 5)]
    assert np.abs(samples - np.concatenate(wanted)).max() < NEAR


def test_a_stream_as_long_as_the_models_may_be_is_an_error(
    codec: SnacCodec, frames: np.ndarray
) -> None:
    engine = Engine([tokens_of(frames)])
    engine.max_len = 20
    with pytest.raises(StreamFull, match="max_model_len"):
        said(orpheus(engine, Letters(), codec), [[1] * 9], Chosen())


def test_it_speaks(codec: SnacCodec, frames: np.ndarray) -> None:
    engine = Engine([tokens_of(frames[:12]), tokens_of(frames[12:])])
    model = orpheus(engine, Letters(), codec)
    utterances = model.utterances('"Hello there." Bye! ...')
    assert utterances[1] == [*map(ord, " Bye!"), *END_OF_PROMPT]
    assert len(utterances) == 2

    chunks = said(model, utterances, Chosen(0.4, seed=5, cache_salt="tenant"))
    assert engine.salts == ["tenant", "tenant"]
    samples = np.concatenate([chunk.samples for chunk in chunks])
    wanted = np.concatenate([codec.decode(frames[:12], 0, 5), codec.decode(frames[12:], 0, 5)])
    assert sum(chunk.num_ended for chunk in chunks) == 2
    assert np.abs(samples - wanted).max() < NEAR
    # All of an utterance is there when it is said to have ended.
    first_end = next(i for i, chunk in enumerate(chunks) if chunk.num_ended)
    num_before = sum(len(chunk.samples) for chunk in chunks[: first_end + 1])
    assert num_before == 12 * codec.frame_samples
    prompt, params = engine.asked[0]
    assert prompt == [START, BEGIN_OF_TEXT, *map(ord, 'leo: "Hello there."'), *END_OF_PROMPT]
    assert params.extra_args == {"kv_source_len": 6}
    assert (params.temperature, params.seed) == (0.4, 5)
    assert CODES.end in params.stop_token_ids
