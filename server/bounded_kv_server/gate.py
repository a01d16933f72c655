"""How many streams sound at once: a few more wait their turn, the rest are told to come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bounded_kv_server.errors import SpeechError
from bounded_kv_server.metrics import metrics

RETRY_AFTER_S = 2


class Gate:
    """Places for `most` streams and a queue for `most_waiting`, first come, first served."""

    def __init__(self, most: int, most_waiting: int) -> None:
        self.most, self.most_waiting = most, most_waiting
        self.num_active = self.num_waiting = 0
        self._places = asyncio.Semaphore(most)

    def check(self) -> None:
        """See that the queue is not full.

        Raises:
            SpeechError: 503, it is.
        """
        if self._places.locked() and self.num_waiting >= self.most_waiting:
            raise SpeechError(
                503,
                None,
                f"{self.most} streams sound and {self.num_waiting} wait, of at most "
                f"--max-audio-streams {self.most} and --max-audio-queue {self.most_waiting}; "
                "try again soon",
                RETRY_AFTER_S,
            )

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place among those that sound.

        Raises:
            SpeechError: see `check`.
        """
        self.check()
        self.num_waiting += 1
        try:
            with metrics().waiting.track_inprogress():
                await self._places.acquire()
        finally:
            self.num_waiting -= 1
        self.num_active += 1
        try:
            with metrics().active.track_inprogress():
                yield
        finally:
            self.num_active -= 1
            self._places.release()
