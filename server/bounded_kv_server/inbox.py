"""What a socket's client sends, read as it comes: who leaves is noticed at once, whatever is on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import ValidationError

from bounded_kv_server.errors import SpeechError
from bounded_kv_server.limits import MESSAGES
from bounded_kv_server.messages import MESSAGE, Clear, Close, Config, Message, Text


class Inbox:
    """A client's messages, as an async context manager."""

    def __init__(self, socket: WebSocket, longest: int) -> None:
        """`longest`: characters of text, in a message and in all that are not taken up."""
        self._socket, self._longest = socket, longest
        self._messages: deque[Message] = deque()
        self._some = asyncio.Event()
        self._size = 0

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def while_here(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work; it is cancelled when the client leaves or sends what will not do.

        Raises:
            WebSocketDisconnect, SpeechError: that is so.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self._reading], return_when=asyncio.FIRST_COMPLETED)
            (task if task.done() else self._reading).result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def end_at(self, ending: asyncio.Event) -> None:
        """Behave, once it is set, as if the client had closed."""
        await ending.wait()
        self._messages.append(Close(type="session.close"))
        self._size += 1
        self._some.set()

    async def next(self) -> Message:
        """The next message."""
        while not self._messages:
            self._some.clear()
            await self._some.wait()
        message = self._messages.popleft()
        self._size -= _size(message)
        return message

    @property
    def is_cleared(self) -> bool:
        """Whether an `input.clear` has come that is not taken up."""
        return any(isinstance(message, Clear) for message in self._messages)

    async def _read(self) -> None:
        is_first = True
        while True:
            message = _parsed(await self._socket.receive())
            if is_first and not isinstance(message, Config):
                problem = f"{message.type}: the first message is session.config"
                raise SpeechError(400, "type", problem)
            if not is_first and isinstance(message, Config):
                raise SpeechError(400, "type", "session.config: only the first message is one")
            is_first = False
            self._check_size(message)
            self._messages.append(message)
            self._some.set()

    def _check_size(self, message: Message) -> None:
        if isinstance(message, Text) and len(message.text) > self._longest:
            raise SpeechError(
                400,
                "text",
                f"text has {len(message.text)} characters; a message must have at most "
                f"{self._longest} (--max-speech-input)",
            )
        self._size += _size(message)
        if self._size > (most := MESSAGES * self._longest):
            raise SpeechError(
                400,
                "text",
                f"{self._size} characters were sent ahead; at most {most} may be "
                f"({MESSAGES} times --max-speech-input): wait for session.ready, and speech.done",
            )


def _size(message: Message) -> int:
    return 1 + (len(message.text) if isinstance(message, Text) else 0)


def _parsed(received: Any) -> Message:
    if received["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(received.get("code", 1006), received.get("reason"))
    text = received.get("text")
    if text is None:
        raise SpeechError(400, None, "messages must be JSON text, not binary")
    try:
        return MESSAGE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "type"
        raise SpeechError(400, field, f"{field}: {first['msg']}") from error
