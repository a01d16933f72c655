"""`WS /v1/audio/speech/stream`: text in piece by piece, sound out while it arrives.

One endless stream a socket. The client's first message is `session.config`; then come
`input.text`, `input.done`, `input.clear` and `session.close` (`messages.py`), in any order. Sound
goes out in binary messages, one continuous encoder's; what it is about goes out as JSON:
`session.ready`, `speech.done` (all text before an `input.done` has been said), `input.cleared`,
`error` and `session.closed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import ValidationError

from bounded_kv_server.apart import Apart
from bounded_kv_server.encoded import Encoded
from bounded_kv_server.encoding import Encoder
from bounded_kv_server.errors import SpeechError, as_status
from bounded_kv_server.messages import MESSAGE, Clear, Close, Config, Done, Message, Text
from bounded_kv_server.metrics import Clock
from bounded_kv_server.profile import Chosen, Chunk
from bounded_kv_server.sentences import Sentences
from bounded_kv_server.server import SpeechServer, server_of

POLICY, FAILED, TRY_AGAIN = 1008, 1011, 1013
"""WebSocket close codes (RFC 6455 and its registry)."""


async def converse(socket: WebSocket) -> None:
    """A socket's whole life."""
    await socket.accept()
    server, clock, outcome = server_of(socket.app), Clock(), "ok"
    try:
        server.speaking()
        config = await _first(socket, server.settings.speech_idle_s)
        server.check_model(config.model)
        async with server.gate.place():
            await _Session(socket, server, config, clock).run()
    except WebSocketDisconnect:
        outcome = "left"
    except SpeechError as error:
        outcome = "broken" if clock.first_s is not None else "refused"
        await _end(socket, error)
    except Exception as error:
        outcome = "broken" if clock.first_s is not None else "failed"
        await _end(socket, as_status(error))
        raise
    finally:
        clock.close(outcome)


async def _end(socket: WebSocket, error: SpeechError) -> None:
    code = {503: TRY_AGAIN, 500: FAILED}.get(error.status, POLICY)
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        await socket.send_json({"type": "error", **error.body()})
        await socket.close(code)


async def _receive(
    socket: WebSocket, idle_s: float, is_busy: Callable[[], bool] = lambda: False
) -> Message:
    """The client's next message.

    Raises:
        SpeechError: it is none of ours, or none has come for `idle_s` seconds, unless busy.
    """
    try:
        while True:
            try:
                text = await asyncio.wait_for(socket.receive_text(), idle_s)
                break
            except TimeoutError:
                if not is_busy():
                    raise SpeechError(
                        400, None, f"no message for {idle_s:g} s (--speech-idle-s)"
                    ) from None
    except KeyError:
        raise SpeechError(400, None, "messages must be JSON text, not binary") from None
    try:
        return MESSAGE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "type"
        raise SpeechError(400, field, f"{field}: {first['msg']}") from error


async def _first(socket: WebSocket, idle_s: float) -> Config:
    message = await _receive(socket, idle_s)
    if not isinstance(message, Config):
        raise SpeechError(400, "type", f"{message.type}: the first message is session.config")
    return message


class _Session:
    """One stream, from what is said to it to what it says.

    Text is read in one task, and spoken in another; `input.clear` ends the stream that speaks, and
    the next text begins a new one.
    """

    def __init__(
        self, socket: WebSocket, server: SpeechServer, config: Config, clock: Clock
    ) -> None:
        self._socket, self._server, self._config, self._clock = socket, server, config, clock
        self._model = server.speaking()
        self._sentences = Sentences(server.settings.max_speech_input)
        self._voice: list[int] = []
        self._given: asyncio.Queue[list[int] | None] = asyncio.Queue()
        """Utterances to come; None: there are no more."""
        self._num_given = self._num_said = 0
        self._marks: list[int] = []
        """Of each `input.done` that is not answered: how many utterances were given before."""
        self._num_waiting = 0
        """Tokens of what is given, and not taken up yet."""

    async def run(self) -> None:
        """Until the client closes, leaves, or is silent too long."""
        config = self._config
        assert self._server.voices is not None
        self._voice = await self._server.voices.source(config.voice)
        encoder = Encoder(config.response_format, self._model.rate, config.speed)
        async with Encoded(self._server.threads, encoder) as encoding:
            await self._tell("session.ready", rate=self._model.rate, format=config.response_format)
            while await self._one_stream(encoding):
                self._given = asyncio.Queue()
                await self._tell("input.cleared")
            if rest := await encoding.finish():
                await self._socket.send_bytes(rest)
        await self._tell("session.closed")
        await self._socket.close()

    async def _one_stream(self, encoding: Encoded) -> bool:
        """Speak until the stream ends (False) or is cleared (True)."""
        chosen = Chosen(self._config.temperature, self._config.seed)
        name = f"speech-{uuid.uuid4()}"
        sound = Apart(self._model.speak(name, self._voice, self._utterances(), chosen))
        speaking = asyncio.create_task(self._speak(sound, encoding))
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait([speaking, reading], return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and reading.result():
                return True
            await speaking  # which raises what has gone wrong, or says the rest
            return False
        finally:
            for task in (speaking, reading):
                task.cancel()
            await asyncio.gather(speaking, reading, sound.stop(), return_exceptions=True)

    async def _read(self) -> bool:
        """Take the client's messages; returns True when it clears, and False when it closes."""
        while True:
            message = await _receive(
                self._socket,
                self._server.settings.speech_idle_s,
                lambda: self._num_said < self._num_given,
            )
            if isinstance(message, Text):
                most = self._server.settings.max_speech_input
                if len(message.text) > most:
                    raise SpeechError(
                        400,
                        "text",
                        f"text has {len(message.text)} characters; a message must have at most "
                        f"{most} (--max-speech-input)",
                    )
                await self._take(self._sentences.add(message.text))
            elif isinstance(message, Done):
                await self._take(self._sentences.flush())
                self._marks.append(self._num_given)
                await self._answer_marks()
            elif isinstance(message, Clear):
                self._sentences.clear()
                self._marks.clear()
                self._num_given = self._num_said = self._num_waiting = 0
                return True
            elif isinstance(message, Close):
                await self._take(self._sentences.flush())
                self._given.put_nowait(None)
                return False
            else:
                raise SpeechError(400, "type", "session.config: only the first message is one")

    async def _take(self, sentences: list[str]) -> None:
        for sentence in sentences:
            for utterance in await self._server.utterances(sentence):
                self._num_given += 1
                self._num_waiting += len(utterance)
                self._given.put_nowait(utterance)
        most = self._server.settings.max_speech_input
        if self._num_waiting > most:
            raise SpeechError(
                400,
                "text",
                f"{self._num_waiting} phones wait to be said; at most {most} may "
                "(--max-speech-input): wait for speech.done",
            )

    async def _speak(self, sound: Apart[Chunk], encoding: Encoded) -> None:
        """Send the sound of a stream, to its end."""
        while chunk := await sound.next():
            if len(chunk.samples):
                data = await encoding.encode(chunk.samples)
                self._clock.heard(len(chunk.samples) / self._model.rate / self._config.speed)
                if data:
                    await self._socket.send_bytes(data)
            if chunk.num_ended:
                self._num_said += chunk.num_ended
                await self._answer_marks()
        if self._num_said < self._num_given:
            raise SpeechError(500, None, "the stream has ended early: it is as long as may be")

    async def _utterances(self) -> AsyncGenerator[list[int]]:
        while (utterance := await self._given.get()) is not None:
            self._num_waiting -= len(utterance)
            yield utterance

    async def _answer_marks(self) -> None:
        while self._marks and self._marks[0] <= self._num_said:
            self._marks.pop(0)
            await self._tell("speech.done")

    def _tell(self, kind: str, **values: Any) -> Coroutine[Any, Any, None]:
        return self._socket.send_json({"type": kind, **values})
