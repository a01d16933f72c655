"""A language model that speaks in a codec's codes, a frame of them after another.

What differs from model to model is plain data: how codes are written in tokens, what a prompt looks
like, how tokens are sampled; and the codec.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from bounded_kv_server.profile import Chosen, Chunk, Floats
from bounded_kv_server.sentences import Sentences
from bounded_kv_server.windowed import Stage
from bounded_kv_speech.turns import Piece, Turn, pieces_of


@dataclass(frozen=True)
class Codes:
    """How frames of codes are written in tokens."""

    first: int
    """Token of a frame's first code where that is 0."""
    codebook: int
    """Codes of a codebook: those of a frame's next code begin so many tokens later."""
    of_frame: int
    end: int
    """Token that ends speech."""


@dataclass(frozen=True)
class Prompt:
    """What an utterance is put into: `before`, a voice's text, the utterance, `after`."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    voices: Mapping[str, str]
    longest: int = 400
    """Characters of an utterance: a longer sentence is cut between words."""


@dataclass(frozen=True)
class Manner:
    """How tokens are sampled, and how many."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    most_frames: int = 12
    """Of speech, for one token of an utterance."""


@dataclass(frozen=True)
class Codec:
    """What makes samples of frames."""

    rate: int
    frame_samples: int
    stream: Callable[[int], Stage]
    """Begins a stream, whose noise is that of a seed: `[F, of_frame]` to samples."""


class FrameReader:
    """Collects tokens into frames; a token that is not the next code of one is left out."""

    def __init__(self, codes: Codes) -> None:
        self._how, self._codes = codes, list[int]()

    def add(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """The frames that are whole now, `[F, of_frame]`."""
        how = self._how
        for token in tokens:
            code = token - how.first - how.codebook * (len(self._codes) % how.of_frame)
            if 0 <= code < how.codebook:
                self._codes.append(code)
        whole = len(self._codes) // how.of_frame * how.of_frame
        frames, self._codes = self._codes[:whole], self._codes[whole:]
        return np.array(frames, np.int64).reshape(-1, how.of_frame)

    def clear(self) -> None:
        """What is left of a frame comes to nothing: what follows begins one."""
        self._codes = []


class Speech:
    """Tokens of a stream to samples, each utterance's decoded by itself, to its last."""

    def __init__(self, frames: FrameReader, stage: Callable[[], Stage]) -> None:
        self._frames, self._begin, self._stage = frames, stage, stage()

    def add(self, pieces: Sequence[Piece]) -> Floats:
        """Samples that are known now, `[N]`."""
        found = []
        for tokens, is_end in pieces:
            found.append(self._stage.feed(self._frames.add(tokens)))
            if is_end:
                found.append(self._stage.finish())
                self._frames.clear()
                self._stage = self._begin()
        return np.concatenate([part for part in found if len(part)] or [np.zeros(0, np.float32)])


class CodecModel:
    """See the module; a `SpeechModel`."""

    takes_instructions = False
    voice_kind = "none"

    def __init__(
        self,
        engine_client: Any,
        tokenizer: Any,
        codes: Codes,
        prompt: Prompt,
        manner: Manner,
        codec: Codec,
    ) -> None:
        self._engine, self._tokenizer = engine_client, tokenizer
        self._codes, self._prompt, self._manner, self._codec = codes, prompt, manner, codec
        self.rate = codec.rate
        self.longest_s = manner.most_frames * codec.frame_samples / codec.rate
        self._decoding = ThreadPoolExecutor(1, "codec")
        self.voices: Mapping[str, Sequence[int]] = {
            name: [*prompt.before, *self._encode(text)] for name, text in prompt.voices.items()
        }

    async def start(self) -> None:
        """Nothing is left to load."""

    def utterances(self, text: str) -> list[list[int]]:
        """Sentence by sentence."""
        sentences = Sentences(self._prompt.longest)
        return [
            [*self._encode(f" {sentence}"), *self._prompt.after]
            for sentence in [*sentences.add(text), *sentences.flush()]
            if any(letter.isalnum() for letter in sentence)
        ]

    def voice_of(self, samples: Floats) -> NDArray[np.int64]:
        """Such models know voices by name.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"this model takes no samples; its voices are {', '.join(self.voices)}")

    def source_of(self, codes: NDArray[np.int64]) -> list[int]:
        """Never asked for: see `voice_of`."""
        raise NotImplementedError

    async def speak(
        self,
        name: str,
        voice: Sequence[int],
        utterances: AsyncIterable[Sequence[int]],
        chosen: Chosen,
    ) -> AsyncGenerator[Chunk]:
        """See `SpeechModel`."""
        seed = chosen.seed or 0
        speech = Speech(FrameReader(self._codes), lambda: self._codec.stream(seed))
        loop = asyncio.get_running_loop()

        async def turns() -> AsyncGenerator[Turn]:
            async for utterance in utterances:
                yield [*voice, *utterance], self._params(chosen, len(voice), len(utterance))

        first = self._params(chosen, len(voice), 0)
        found = pieces_of(self._engine, name, first, turns(), chosen.cache_salt)
        async with aclosing(found) as parts:
            async for pieces in parts:
                samples = await loop.run_in_executor(self._decoding, speech.add, pieces)
                num_ended = sum(is_end for _, is_end in pieces)
                yield Chunk(samples, sum(len(tokens) for tokens, _ in pieces), num_ended)

    def _params(self, chosen: Chosen, voice: int, size: int) -> SamplingParams:
        manner = self._manner
        return SamplingParams(
            temperature=manner.temperature if chosen.temperature is None else chosen.temperature,
            top_p=manner.top_p,
            top_k=manner.top_k,
            repetition_penalty=manner.repetition_penalty,
            seed=chosen.seed,
            max_tokens=max(1, size * manner.most_frames * self._codes.of_frame),
            stop_token_ids=[self._codes.end],
            ignore_eos=True,  # nothing but `end` ends an utterance
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_source_len": voice},
        )

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens
