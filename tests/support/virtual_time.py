"""An event loop whose clock jumps: what waits for seconds runs at once, on any machine."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class JumpingLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can run, and jumps to the next timer when nothing can."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Seconds since the loop was made, all of them jumped over."""
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select(None)
        events = super().select(0)
        if not events:
            self._loop.now += max(timeout, 0.0)
        return events


def run_jumping(test: Callable[[], Coroutine[Any, Any, None]], module: ModuleType) -> None:
    """Run `test` in a `JumpingLoop`, by whose clock `module`, which reads `time`, goes as well."""
    with (
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner(loop_factory=JumpingLoop) as runner,
    ):
        loop = runner.get_loop()
        patch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
        runner.run(test())
