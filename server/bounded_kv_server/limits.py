"""How long a socket may take over things, and how much may wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bounded_kv_server.errors import SpeechError

MESSAGES = 8
"""Of the greatest length, that may wait to be said: a language model writes many times as fast as
its words are spoken."""


class Expired(SpeechError):
    """A socket is closed because of its time, not of what it sent."""

    def __init__(self, message: str) -> None:
        super().__init__(400, None, message)


@asynccontextmanager
async def within(seconds: float, late: Exception) -> AsyncIterator[None]:
    """What is done in it is cancelled after so many seconds, and `late` is raised."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise late from None
        raise
