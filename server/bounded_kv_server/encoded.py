"""A response's encoder, off the event loop: on a few threads that all responses share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from types import TracebackType
from typing import Self, TypeVar

from bounded_kv_server.encoding import Encoder
from bounded_kv_server.metrics import metrics
from bounded_kv_server.profile import Floats

T = TypeVar("T")


class Encoded:
    """An `Encoder` as an async context manager; leaving it frees the encoder, whatever happened."""

    def __init__(self, threads: Executor, encoder: Encoder) -> None:
        self._threads, self._encoder = threads, encoder
        self._busy: asyncio.Future[bytes] | None = None
        """What a task that was cancelled has left to a thread: nothing is encoded after it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._busy is not None:
            await asyncio.wait([self._busy])
        self._encoder.close()

    async def encode(self, samples: Floats) -> bytes:
        """What is ready after `samples [N]`; there may be nothing."""
        return await self._run(lambda: self._encoder.encode(samples))

    async def settle(self) -> bytes:
        """What is held back, pushed out by silence."""
        return await self._run(self._encoder.settle)

    async def finish(self) -> bytes:
        """The rest."""
        return await self._run(self._encoder.finish)

    async def _run(self, call: Callable[[], bytes]) -> bytes:
        self._busy = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            ready = await asyncio.shield(self._busy)
        except Exception:
            metrics().encoder_errors.inc()
            raise
        self._busy = None
        return ready
