"""The embedded voice as a speech profile."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bounded_kv_server.profile import Chosen, Chunk, Floats, SpeechModel
from bounded_kv_server.settings import SpeechSettings
from bounded_kv_speech.decode import StreamingDecoder
from bounded_kv_speech.durations import LONGEST
from bounded_kv_speech.frames import CODE_RATE, SAMPLE_RATE
from bounded_kv_speech.front_end import FrontEnd
from bounded_kv_speech.package import Package
from bounded_kv_speech.speak import Sampling, Speaker
from bounded_kv_speech.tokens import END
from bounded_kv_speech.voice import source_of, voice_of


class Embedded:
    """A package of the embedded voice, served by vLLM."""

    rate = SAMPLE_RATE
    longest_s = (LONGEST + 1) / CODE_RATE
    takes_instructions = False

    def __init__(self, engine_client: Any, package: Package, max_streams: int) -> None:
        self.voices: Mapping[str, Sequence[int]] = package.voices
        self.voice_kind = f"embedded-{_digest(package.folder / 'codec.safetensors')}"
        self._encoder = package.codec.encoder
        self._front_end, self._words = FrontEnd(), threading.Lock()
        self._speaker = Speaker(engine_client, StreamingDecoder(package.codec.decoder, max_streams))

    async def start(self) -> None:
        """Load the words, begin to decode."""
        self._front_end.utterances("Hello.")
        await self._speaker.__aenter__()

    def utterances(self, text: str) -> list[list[int]]:
        """Sentences, in phones."""
        with self._words:
            return self._front_end.utterances(text)

    def voice_of(self, samples: Floats) -> NDArray[np.int64]:
        """Its codes."""
        return voice_of(samples, self._encoder)

    def source_of(self, codes: NDArray[np.int64]) -> list[int]:
        """The codes, said to be a voice's."""
        return source_of(codes)

    async def speak(
        self,
        name: str,
        voice: Sequence[int],
        utterances: AsyncIterable[Sequence[int]],
        chosen: Chosen,
    ) -> AsyncGenerator[Chunk]:
        """See `SpeechModel`."""
        default = Sampling()
        temperature = default.temperature if chosen.temperature is None else chosen.temperature
        sampling = Sampling(temperature, default.top_k, chosen.seed)
        stream = self._speaker.speak(name, voice, utterances, sampling, chosen.cache_salt)
        async with aclosing(stream):
            async for said in stream:
                yield Chunk(said.samples, len(said.tokens), said.tokens.count(END))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class EmbeddedProfile:
    """See `Profile`."""

    logits_processors = ("bounded_kv_speech.order:PhoneOrder",)

    def load(self, engine_client: Any, settings: SpeechSettings) -> SpeechModel:
        """The package that holds the served model, in its folder `lm`."""
        package = Package.load(Path(engine_client.vllm_config.model_config.model).parent)
        return Embedded(engine_client, package, settings.max_audio_streams)


PROFILE = EmbeddedProfile()
