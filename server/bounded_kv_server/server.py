"""The speech server of one process: the model that speaks, and what all its responses share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from fastapi import FastAPI

from bounded_kv_server.errors import SpeechError
from bounded_kv_server.gate import Gate
from bounded_kv_server.metrics import metrics
from bounded_kv_server.pins import Pins
from bounded_kv_server.profile import Chosen, SpeechModel
from bounded_kv_server.settings import SpeechSettings
from bounded_kv_server.upload import Uploads
from bounded_kv_server.voices import Voices
from bounded_kv_speech.turns import given

NUM_THREADS = 4
"""Of encoders, which let go of the interpreter's lock in their loops."""
WARM_TEXT = "Ready."


class SpeechServer:
    """`model`: None where the served model does not speak; `names` are what it is served as."""

    def __init__(
        self,
        model: SpeechModel | None,
        names: Sequence[str],
        settings: SpeechSettings,
        pins: Pins,
    ) -> None:
        self.settings, self.names = settings, names
        self._model = model
        self.gate = Gate(settings.max_audio_streams, settings.max_audio_queue)
        self.threads = ThreadPoolExecutor(NUM_THREADS, "speech")
        self._text = ThreadPoolExecutor(1, "speech-text")  # no text keeps sound waiting
        self.uploads = Uploads()
        self.ending = asyncio.Event()
        """Set when the server is told to end: sockets say what they have, and close."""
        self.voices = Voices(model, settings, pins) if model else None

    def speaking(self) -> SpeechModel:
        """The model.

        Raises:
            SpeechError: 404, it does not speak.
        """
        if self._model is None:
            raise SpeechError(
                404,
                "model",
                f"the model {self.names[0]!r} has no speech profile: it makes text, which "
                "/v1/chat/completions and /v1/completions serve; serve one that speaks "
                "(bounded-kv-server), or name its profile with --speech-profile",
            )
        return self._model

    def check_model(self, name: str | None) -> None:
        """Refuse the name of a model that is not served, or that does not speak.

        Raises:
            SpeechError: 404.
        """
        self.speaking()
        if name is not None and name not in self.names:
            raise SpeechError(
                404, "model", f"model={name!r}: is not served here; {', '.join(self.names)} is"
            )

    async def utterances(self, text: str) -> list[list[int]]:
        """What there is to say in a text, worked out beside the event loop."""
        model = self.speaking()
        return await asyncio.get_running_loop().run_in_executor(self._text, model.utterances, text)

    async def start(self) -> None:
        """Load what is loaded once, and say a word: the first client waits for nothing."""
        if self._model is None or self.voices is None:
            return
        await self._model.start()
        await self.voices.start()
        metrics().voices.set(self.voices.count())
        utterances = await self.utterances(WARM_TEXT)

        voice = next(iter(self._model.voices.values()))
        async for _ in self._model.speak("speech-warm", voice, given(utterances), Chosen(seed=0)):
            pass


def server_of(app: FastAPI) -> SpeechServer:
    """The app's speech server."""
    server: SpeechServer = app.state.bounded_kv_speech
    return server
