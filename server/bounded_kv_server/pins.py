"""Voices as pinned sources of the engine: those used last, as many as its quota holds."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import OrderedDict
from typing import Any, Protocol
from weakref import WeakValueDictionary

from vllm_bounded_kv.engine.source_routes import call, pin
from vllm_bounded_kv.engine.sources import SourceError

PREFIX = "voice-"
"""Of the names among the engine's pinned sources."""
QUOTA = "--bounded-kv-max-pinned-blocks"
"""Named by what the engine refuses for want of room, and by nothing else."""
_logger = logging.getLogger(__name__)


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
        self._unfit: set[str] = set()
        """Those that the engine will never pin: too short or too long, say."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def use(self, tokens: list[int]) -> None:
        """See `Pins`; for want of room, those used longest ago go.

        Where it cannot be pinned, each request computes it.
        """
        name = _name_of(tokens)
        async with self._lock(name):
            if name in self._unfit:
                return
            try:
                if await self._pin(name, tokens):
                    self._pinned[name] = None
                    self._pinned.move_to_end(name)
            except Exception as error:
                _logger.warning("a voice is not pinned: %s: %s", type(error).__name__, error)
                if isinstance(error, SourceError) and error.status == 400:
                    self._unfit.add(name)

    async def drop(self, tokens: list[int]) -> None:
        """See `Pins`."""
        name = _name_of(tokens)
        async with self._lock(name):
            if name in self._pinned:
                await self._let_go(name)

    def _lock(self, name: str) -> asyncio.Lock:
        """So that the same tokens are pinned once at a time; others do not wait for it."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def _pin(self, name: str, tokens: list[int]) -> bool:
        """Whether there is room for it, when others have gone."""
        while True:
            try:
                # Also what was pinned: somebody may have let go of it by the plugin's route.
                await pin(self._engine, name, tokens)
                return True
            except SourceError as error:
                self._pinned.pop(name, None)
                if error.status != 409 or QUOTA not in str(error):
                    raise
                if not self._pinned:
                    return False
                await self._let_go(next(iter(self._pinned)))

    async def _let_go(self, name: str) -> None:
        del self._pinned[name]
        with contextlib.suppress(SourceError):  # let go of already, through the plugin's own route
            await call(self._engine, "remove", name=name, cache_salt=None)
