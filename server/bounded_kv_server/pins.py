"""Voices as pinned sources of the engine: those used last, as many as its quota holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import Any, Protocol

from vllm_bounded_kv.engine.source_routes import call, pin
from vllm_bounded_kv.engine.sources import SourceError


class Pins(Protocol):
    """Sources that stay computed."""

    async def use(self, name: str, tokens: list[int]) -> None:
        """Pin a source that is about to be used, if there is room for it at all."""
        ...

    async def drop(self, name: str) -> None:
        """Let go of a source. Streams that use it go on."""
        ...


class EnginePins:
    """The engine's, through its client."""

    def __init__(self, engine_client: Any) -> None:
        self._engine = engine_client
        self._pinned: OrderedDict[str, None] = OrderedDict()
        self._lock = asyncio.Lock()

    async def use(self, name: str, tokens: list[int]) -> None:
        """See `Pins`; for want of room, those used longest ago go."""
        async with self._lock:
            if name in self._pinned:
                self._pinned.move_to_end(name)
                return
            while True:
                try:
                    await pin(self._engine, name, tokens)
                except SourceError:
                    if not self._pinned:
                        return  # no room for any: each request computes it
                    await self._let_go(next(iter(self._pinned)))
                    continue
                self._pinned[name] = None
                return

    async def drop(self, name: str) -> None:
        """See `Pins`."""
        async with self._lock:
            if name in self._pinned:
                await self._let_go(name)

    async def _let_go(self, name: str) -> None:
        del self._pinned[name]
        with contextlib.suppress(SourceError):  # let go of already, through the plugin's own route
            await call(self._engine, "remove", name=name, cache_salt=None)
