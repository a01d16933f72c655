"""An async generator that runs in a task of its own, one value ahead of who takes them.

Who sends is cancelled in ways that nothing can be cleaned up in: again at each await where a client
leaves (anyio's scopes), or while what has failed is cleaning up. What makes is cancelled once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")


class Apart(Generic[T]):
    """See the module."""

    def __init__(self, content: AsyncGenerator[T]) -> None:
        """Starts it."""
        self._values: asyncio.Queue[T | Exception | None] = asyncio.Queue(1)
        self._making = asyncio.create_task(self._make(content))

    async def next(self) -> T | None:
        """The next value; None: there is none.

        Raises:
            whatever the generator raises.
        """
        value = await self._values.get()
        if isinstance(value, Exception):
            raise value
        return value

    async def stop(self) -> None:
        """Close it, wherever it is, and wait until it is closed; then `next` returns None."""
        self._making.cancel()
        await asyncio.gather(self._making, return_exceptions=True)
        if self._values.full():
            self._values.get_nowait()
        self._values.put_nowait(None)

    async def _make(self, content: AsyncGenerator[T]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(content):
                async for value in content:
                    await self._values.put(value)
        except Exception as error:
            end = error
        await self._values.put(end)
