"""Orpheus (Canopy Labs): a Llama that speaks in the codes of SNAC, seven a frame of 85 ms.

Its prompt is a start token, "VOICE: TEXT", and four tokens that end it and begin speech. Codes are
the tokens from `FIRST_CODE` on: of the seven of a frame each has 4,096 of its own. The model is
served as the Llama it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from bounded_kv_server.profile import Chosen, Chunk, Floats, SpeechModel
from bounded_kv_server.sentences import Sentences
from bounded_kv_server.settings import SpeechSettings
from bounded_kv_server.snac_codec import FRAME_CODES, SnacCodec
from bounded_kv_server.turns import tokens_of
from bounded_kv_server.windowed import Windowed

CODEC = "hubertsiuzdak/snac_24khz"
"""Where `--speech-codec` says nothing else."""
VOICES = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
START, BEGIN_OF_TEXT = 128259, 128000
END_OF_PROMPT = (128009, 128260, 128261, 128257)
END_OF_SPEECH = 128258
FIRST_CODE, CODEBOOK = 128266, 4096
TEMPERATURE, TOP_P, REPETITION_PENALTY = 0.6, 0.8, 1.3
LONGEST_SENTENCE = 400
"""Characters: longer ones are cut between words."""
CODES_PER_TOKEN = 84
"""Of speech, for one token of text, at most: a second."""


class Frames:
    """Collects tokens into frames; a token that is not the next code of one is left out."""

    def __init__(self) -> None:
        self._codes: list[int] = []

    def add(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """The frames that are whole now, `[F, FRAME_CODES]`."""
        for token in tokens:
            code = token - FIRST_CODE - CODEBOOK * (len(self._codes) % FRAME_CODES)
            if 0 <= code < CODEBOOK:
                self._codes.append(code)
        whole = len(self._codes) // FRAME_CODES * FRAME_CODES
        frames, self._codes = self._codes[:whole], self._codes[whole:]
        return np.array(frames, np.int64).reshape(-1, FRAME_CODES)


class Orpheus:
    """See the module."""

    takes_instructions = False

    def __init__(self, engine_client: Any, tokenizer: Any, codec: SnacCodec) -> None:
        self._engine, self._tokenizer, self._codec = engine_client, tokenizer, codec
        self.rate = codec.rate
        self.longest_s = CODES_PER_TOKEN / FRAME_CODES * codec.frame_samples / codec.rate
        self._decoding = ThreadPoolExecutor(1, "snac")
        self.voices: Mapping[str, Sequence[int]] = {
            name: [START, BEGIN_OF_TEXT, *self._encode(f"{name}:")] for name in VOICES
        }

    async def start(self) -> None:
        """Nothing is left to load."""

    def utterances(self, text: str) -> list[list[int]]:
        """Sentence by sentence."""
        sentences = Sentences(LONGEST_SENTENCE)
        found = [*sentences.add(text), *sentences.flush()]
        return [
            [*self._encode(f" {sentence}"), *END_OF_PROMPT]
            for sentence in found
            if any(letter.isalnum() for letter in sentence)
        ]

    def voice_of(self, samples: Floats) -> NDArray[np.int64]:
        """Orpheus knows voices by name.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"this model takes no samples of voices; its voices are {VOICES}")

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
        seed, frames = chosen.seed or 0, Frames()
        sound = Windowed(
            lambda window, first: self._codec.decode(window, first, seed),
            self._codec.back,
            self._codec.ahead,
        )
        loop = asyncio.get_running_loop()

        async def turns() -> AsyncGenerator[list[int]]:
            async for utterance in utterances:
                yield [*voice, *utterance]

        def params_of(size: int) -> SamplingParams:
            return self._params(chosen, len(voice), size)

        async for tokens in tokens_of(self._engine, name, turns(), params_of):
            samples = await loop.run_in_executor(self._decoding, sound.feed, frames.add(tokens))
            yield Chunk(samples, len(tokens), tokens.count(END_OF_SPEECH))
        yield Chunk(await loop.run_in_executor(self._decoding, sound.finish), 0, 0)

    def _params(self, chosen: Chosen, voice: int, size: int) -> SamplingParams:
        return SamplingParams(
            temperature=TEMPERATURE if chosen.temperature is None else chosen.temperature,
            top_p=TOP_P,
            repetition_penalty=REPETITION_PENALTY,
            seed=chosen.seed,
            max_tokens=max(1, size * CODES_PER_TOKEN),
            stop_token_ids=[END_OF_SPEECH],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_source_len": voice},
        )

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens


class OrpheusProfile:
    """See `Profile`."""

    logits_processors = ()

    def load(self, engine_client: Any, settings: SpeechSettings) -> SpeechModel:
        """The served Llama, with SNAC beside it."""
        codec = SnacCodec.load(settings.codec or CODEC)
        return Orpheus(engine_client, engine_client.get_tokenizer(), codec)


PROFILE = OrpheusProfile()
