"""What one stream of a socket is given to say: how much of it waits, and how far it is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

AHEAD = 2
"""Utterances that the engine has at a time: one that sounds, and the next, so that there is no gap.
It would take all there is, and what it has cannot be counted as waiting."""


class Backlog:
    """Utterances, in order, and marks between them."""

    def __init__(self) -> None:
        self._given: asyncio.Queue[list[int] | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(AHEAD)
        self._lens: deque[int] = deque()
        """Of utterances that have not ended."""
        self._num_given = self._num_said = 0
        self._marks: deque[int] = deque()
        """Of each: how many utterances were given before."""
        self.num_waiting = 0
        """Tokens of utterances that have not ended."""

    @property
    def num_left(self) -> int:
        """Utterances that have not ended."""
        return self._num_given - self._num_said

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be said."""
        return self.num_left > 0

    def add(self, utterance: list[int]) -> None:
        """To be said after all others."""
        self._num_given += 1
        self._lens.append(len(utterance))
        self.num_waiting += len(utterance)
        self._given.put_nowait(utterance)

    def mark(self) -> None:
        """Remember this point: see `take_mark`."""
        self._marks.append(self._num_given)

    def close(self) -> None:
        """Nothing more is to be said."""
        self._given.put_nowait(None)

    async def utterances(self) -> AsyncGenerator[list[int]]:
        """For the engine: no more at a time than `AHEAD`."""
        while (utterance := await self._given.get()) is not None:
            await self._room.acquire()
            yield utterance

    def end(self, count: int) -> None:
        """So many more utterances have been said."""
        for _ in range(min(count, len(self._lens))):
            self._num_said += 1
            self.num_waiting -= self._lens.popleft()
            self._room.release()

    def take_mark(self) -> bool:
        """Whether all before the oldest mark has been said; the mark is gone then."""
        is_reached = bool(self._marks) and self._marks[0] <= self._num_said
        if is_reached:
            self._marks.popleft()
        return is_reached
