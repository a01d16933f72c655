"""One client's speech over a socket, from what is said to it to what it says."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress

from bounded_kv_server.apart import Apart
from bounded_kv_server.backlog import Backlog
from bounded_kv_server.encoded import Encoded
from bounded_kv_server.encoding import Encoder
from bounded_kv_server.errors import SpeechError
from bounded_kv_server.inbox import Inbox
from bounded_kv_server.limits import MESSAGES, Expired
from bounded_kv_server.messages import Clear, Config, Done, Message, Text
from bounded_kv_server.metrics import Clock
from bounded_kv_server.outbox import Outbox
from bounded_kv_server.profile import Chosen, Chunk
from bounded_kv_server.sentences import Sentences
from bounded_kv_server.server import SpeechServer


class Session:
    """See the module.

    Text is read in one task, and spoken in another; `input.clear` ends the stream that speaks, and
    the next text begins a new one.
    """

    def __init__(
        self, server: SpeechServer, config: Config, inbox: Inbox, outbox: Outbox, clock: Clock
    ) -> None:
        self._server, self._config, self._clock = server, config, clock
        self._inbox, self._outbox = inbox, outbox
        self._model = server.speaking()
        self._sentences = Sentences(server.settings.max_speech_input)
        self._voice: list[int] = []
        self._active_at = self._now()
        """When there was something to say, or something was said, last."""

    async def run(self) -> None:
        """Until the client closes, or nothing is said for too long."""
        config = self._config
        assert self._server.voices is not None
        self._voice = self._server.voices.tokens(config.voice)
        await self._server.voices.pin(self._voice, config.cache_salt)
        encoder = Encoder(config.response_format, self._model.rate, config.speed)
        async with Encoded(self._server.threads, encoder) as encoding:
            await self._outbox.tell(
                "session.ready", rate=self._model.rate, format=config.response_format
            )
            self._clock.rest()
            while await self._one_stream(encoding):
                await self._outbox.tell("input.cleared")
            await self._outbox.sound(await encoding.finish())
        await self._outbox.tell("session.closed")

    async def _one_stream(self, encoding: Encoded) -> bool:
        """Speak until the stream ends (False) or is cleared (True)."""
        backlog = Backlog()
        config = self._config
        chosen = Chosen(config.temperature, config.seed, config.cache_salt)
        name = f"speech-{uuid.uuid4()}"
        sound = Apart(self._model.speak(name, self._voice, backlog.utterances(), chosen))
        speaking = asyncio.create_task(self._speak(sound, backlog, encoding))
        reading = asyncio.create_task(self._read(backlog))
        try:
            await asyncio.wait([speaking, reading], return_when=asyncio.FIRST_COMPLETED)
            is_cleared = reading.done() and reading.result()
            if is_cleared:
                # Sound that is encoded is sent: a file without its middle would be none.
                await sound.stop()
                self._clock.rest()
            await speaking  # which raises what has gone wrong, or says the rest
            if not is_cleared and (backlog.is_busy or not reading.done()):
                raise SpeechError(500, None, "the stream has ended early: it is as long as may be")
            return is_cleared
        finally:
            for task in (speaking, reading):
                task.cancel()
            await asyncio.gather(speaking, reading, sound.stop(), return_exceptions=True)

    async def _read(self, backlog: Backlog) -> bool:
        """Take the client's messages; returns True when it clears, and False when it closes."""
        while True:
            message = await self._next(backlog)
            if isinstance(message, Text):
                if any(letter.isalnum() for letter in message.text):
                    self._active_at = self._now()
                await self._take(self._sentences.add(message.text), backlog)
            elif isinstance(message, Done):
                await self._take(self._sentences.flush(), backlog)
                backlog.mark()
                await self._answer_marks(backlog)
            elif isinstance(message, Clear):
                self._sentences.clear()
                return True
            else:
                await self._take(self._sentences.flush(), backlog)
                backlog.close()
                return False

    async def _next(self, backlog: Backlog) -> Message:
        """The client's next message.

        Raises:
            SpeechError: nothing has been said for too long, by neither side.
        """
        idle_s = self._server.settings.speech_idle_s
        while True:
            left_s = self._active_at + idle_s - self._now()
            if self._outbox.is_sending:  # which has a limit of its own
                left_s = idle_s
            if left_s <= 0 and backlog.is_busy:
                raise SpeechError(500, None, f"no sound has come for {idle_s:g} s")
            if left_s <= 0:
                raise Expired(f"no text or sound for {idle_s:g} s (--speech-idle-s)")
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    return await self._inbox.next()

    async def _take(self, sentences: list[str], backlog: Backlog) -> None:
        for sentence in sentences:
            for utterance in await self._server.utterances(sentence):
                backlog.add(utterance)
                self._clock.work()
            if self._inbox.is_cleared:  # all of it is to be forgotten
                return
        most = MESSAGES * self._server.settings.max_speech_input
        if backlog.num_waiting > most:
            raise SpeechError(
                400,
                "text",
                f"{backlog.num_waiting} tokens wait to be said; at most {most} may "
                f"({MESSAGES} times --max-speech-input): wait for speech.done",
            )

    async def _speak(self, sound: Apart[Chunk], backlog: Backlog, encoding: Encoded) -> None:
        """Send the sound of a stream, to its end."""
        while chunk := await sound.next():
            if len(chunk.samples):
                data = await encoding.encode(chunk.samples)
                self._clock.heard(len(chunk.samples) / self._model.rate / self._config.speed)
                await self._outbox.sound(data)
                self._active_at = self._now()
            if chunk.num_ended:
                if chunk.num_ended >= backlog.num_left:  # `speech.done` is told when all is sent
                    await self._outbox.sound(await encoding.settle())
                backlog.end(chunk.num_ended)
                await self._answer_marks(backlog)
                if not backlog.is_busy:
                    self._clock.rest()

    async def _answer_marks(self, backlog: Backlog) -> None:
        while backlog.take_mark():
            await self._outbox.tell("speech.done")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
