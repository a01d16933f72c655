"""A streaming response whose first part is there before its status goes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from bounded_kv_server.apart import Apart
from bounded_kv_server.limits import within
from bounded_kv_server.metrics import Clock

T = TypeVar("T")


class SpeechResponse(StreamingResponse):
    """Sends what `content` yields; closes it, and the clock, whatever happens.

    What fails after the first part breaks the transfer: the client's reading fails, it does not
    end. What fails before it fails in `begin`, where there can be another status. A client that
    takes more than `limit_s` to read a part is taken to have left.

    `content` runs `Apart`.
    """

    def __init__(
        self, content: AsyncGenerator[bytes], clock: Clock, limit_s: float, **kwargs: Any
    ) -> None:
        super().__init__(self._all(), **kwargs)
        self._limit_s = limit_s
        self._parts = Apart(content)
        self._clock = clock
        self._first = b""
        self._outcome = "left"

    async def begin(self) -> None:
        """Wait for the first part.

        Raises:
            whatever keeps it from coming.
        """
        try:
            self._first = await self._parts.next() or b""
        except BaseException:
            await self._parts.stop()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        late = TimeoutError(f"the client has read nothing for {self._limit_s:g} s")

        async def limited(message: Message) -> None:
            async with within(self._limit_s, late):
                await send(message)

        try:
            await super().__call__(scope, receive, limited)
        finally:
            await self._parts.stop()
            self._clock.close(self._outcome)

    async def _all(self) -> AsyncGenerator[bytes]:
        try:
            part: bytes | None = self._first
            while part:
                yield part
                part = await self._parts.next()
        except Exception:
            self._outcome = "broken"
            raise
        self._outcome = "ok"


async def with_pauses(parts: AsyncGenerator[T], every_s: float) -> AsyncGenerator[T | None]:
    """The parts, and a None whenever the next has not come for `every_s` seconds."""
    pending: asyncio.Task[T | None] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(parts))
            done, _ = await asyncio.wait([pending], timeout=every_s)
            if not done:
                yield None
                continue
            part, pending = pending.result(), None
            if part is None:
                return
            yield part
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await parts.aclose()


async def _next(parts: AsyncGenerator[T]) -> T | None:
    return await anext(parts, None)
