"""Voices as pinned sources of the engine: those used last, as many as its quota holds."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from typing import Any, Protocol

from vllm_bounded_kv.engine.source_routes import call, pin
from vllm_bounded_kv.engine.sources import SourceError

PREFIX = "voice-"
"""Of the names among the engine's pinned sources."""


def _name_of(tokens: list[int]) -> str:
    """A name that nobody gives to other tokens."""
    return PREFIX + hashlib.sha256(repr(tokens).encode()).hexdigest()[:24]


class Pins(Protocol):
    """Sources that stay computed."""

    async def use(self, tokens: list[int]) -> None:
        """Pin a source that is about to be used, if there is room for it at all."""
        ...

    async def drop(self, tokens: list[int]) -> None:
        """Let go of a source. Streams that use it go on."""
        ...


class EnginePins:
    """The engine's, through its client."""

    def __init__(self, engine_client: Any) -> None:
        self._engine = engine_client
        self._pinned: OrderedDict[str, None] = OrderedDict()
        self._lock = asyncio.Lock()

    async def use(self, tokens: list[int]) -> None:
        """See `Pins`; for want of room, those used longest ago go."""
        name = _name_of(tokens)
        async with self._lock:
            while True:
                try:
                    # Also what was pinned: somebody may have let go of it by the plugin's route.
                    await pin(self._engine, name, tokens)
                except SourceError:
                    self._pinned.pop(name, None)
                    if not self._pinned:
                        return  # no room for any: each request computes it
                    await self._let_go(next(iter(self._pinned)))
                    continue
                self._pinned[name] = None
                self._pinned.move_to_end(name)
                return

    async def drop(self, tokens: list[int]) -> None:
        """See `Pins`."""
        async with self._lock:
            if (name := _name_of(tokens)) in self._pinned:
                await self._let_go(name)

    async def _let_go(self, name: str) -> None:
        del self._pinned[name]
        with contextlib.suppress(SourceError):  # let go of already, through the plugin's own route
            await call(self._engine, "remove", name=name, cache_salt=None)
