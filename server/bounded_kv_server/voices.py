"""The voices of a server: those that come with the model, and those uploaded.

Each is a source. Those used last are pinned in the engine, as many as its quota for pinned sources
holds; what a request of any other voice says is the same, only its voice is computed anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bounded_kv_server.errors import SpeechError
from bounded_kv_server.metrics import metrics
from bounded_kv_server.pins import Pins
from bounded_kv_server.profile import SpeechModel
from bounded_kv_server.sample import read_sample_safely
from bounded_kv_server.sample_decoder import SampleError
from bounded_kv_server.settings import SpeechSettings
from bounded_kv_server.voice_store import StoredVoice, VoiceStore, VoiceStoreFull

AT_ONCE = 2
"""Samples that are decoded at a time."""


@dataclass(frozen=True)
class Listed:
    """A voice, as it is listed."""

    id: str
    name: str
    built_in: bool
    created: int

    def view(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "id": self.id,
            "object": "audio.voice",
            "name": self.name,
            "built_in": self.built_in,
            "created_at": self.created,
        }


class Voices:
    """See the module."""

    def __init__(self, model: SpeechModel, settings: SpeechSettings, pins: Pins) -> None:
        self._model, self._pins = model, pins
        self._store = VoiceStore(settings.voices_folder, model.voice_kind, settings.max_voices)
        self._started = int(time.time())
        self._decoding = asyncio.Semaphore(AT_ONCE)

    async def start(self) -> None:
        """Pin what comes with the model, as far as the quota goes."""
        for name in self._model.voices:
            await self.pin(self.tokens(name))

    def count(self) -> int:
        """Of all voices."""
        return len(self._model.voices) + len(self._store.list())

    def listed(self) -> list[Listed]:
        """All of them, those that come with the model first."""
        built_in = [Listed(name, name, True, self._started) for name in self._model.voices]
        return built_in + [_listed(voice) for voice in self._store.list()]

    def tokens(self, name: str | None) -> list[int]:
        """Of a voice's source; None: the first's.

        Raises:
            SpeechError: 404, no such voice.
        """
        if name is None:
            name = next(iter(self._model.voices))
        if name in self._model.voices:
            return list(self._model.voices[name])
        return self._model.source_of(self._find(name).codes)

    async def pin(self, tokens: list[int], cache_salt: str | None = None) -> None:
        """Pin a source that is about to be used, if the quota lets it.

        What is pinned is everybody's: a tenant with a salt computes its own.
        """
        if cache_salt is None:
            await self._pins.use(tokens)

    async def add(self, name: str, data: bytes, consent: str) -> Listed:
        """A voice from a sample in some audio format; one of that name is replaced.

        Raises:
            SpeechError: naming what is wrong with the name or the sample, or that there is no room.
        """
        if name in self._model.voices:
            raise SpeechError(409, "name", f"name={name!r}: is a voice that comes with the model")
        with _refusals():
            self._store.check(name)
        try:
            async with self._decoding:
                samples = await read_sample_safely(data)
                codes = await asyncio.to_thread(self._model.voice_of, samples)
        except (SampleError, ValueError) as error:
            raise SpeechError(400, "audio_sample", f"audio_sample: {error}") from error
        with _refusals():
            voice = await asyncio.to_thread(
                self._store.add, name, codes, consent=consent, created=int(time.time())
            )
        metrics().voices.set(self.count())
        return _listed(voice)

    async def remove(self, name: str) -> Listed:
        """Forget an uploaded voice; streams that have begun go on in it.

        Raises:
            SpeechError: there is none of that name, or it comes with the model.
        """
        if name in self._model.voices:
            raise SpeechError(409, "name", f"name={name!r}: comes with the model; it stays")
        voice = await asyncio.to_thread(self._store.remove, name)
        if voice is None:
            raise self._unknown(name)
        metrics().voices.set(self.count())
        # The same sample may go by another name.
        if all(other.id != voice.id for other in self._store.list()):
            await self._pins.drop(self._model.source_of(voice.codes))
        return _listed(voice)

    def _find(self, name: str) -> StoredVoice:
        voice = self._store.get(name)
        if voice is None:
            raise self._unknown(name)
        return voice

    def _unknown(self, name: str) -> SpeechError:
        known = ", ".join(each.name for each in self.listed())
        return SpeechError(404, "voice", f"voice={name!r}: no such voice; there are {known}")


@contextmanager
def _refusals() -> Iterator[None]:
    """What the store refuses, as a client is told."""
    try:
        yield
    except VoiceStoreFull as error:
        raise SpeechError(409, "name", str(error)) from error
    except ValueError as error:
        raise SpeechError(400, "name", str(error)) from error


def _listed(voice: StoredVoice) -> Listed:
    return Listed(voice.id, voice.name, False, voice.created)
