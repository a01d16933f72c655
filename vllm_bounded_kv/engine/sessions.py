"""Limits of sessions: streams that are spoken to in pieces and hold their slot in between.

Lives in the front end, where pieces come in. A session that is ended here has simply no further
input: vLLM finishes its last turn, gives its slot back, and `generate` returns. Imports no vLLM.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

from vllm_bounded_kv import metrics
from vllm_bounded_kv.engine.policy import PolicyError

IDLE, CAP = metrics.END_REASONS
CLOSE_S = 5.0
"""How long an ended session waits for the client's generator to take note of it."""


class Session:
    """One stream of input. Idle while every piece it was given has been answered."""

    def __init__(self, makes_way: Session | None = None) -> None:
        self.makes_way = makes_way
        """The idle session that ends in favour of this one."""
        self.idle_since: float | None = time.monotonic()
        """`None` while the engine owes it an answer."""
        self._unanswered = 0
        self._end_reason: str | None = None
        self._changed = asyncio.Event()

    def end(self, reason: str) -> None:
        """No more input after what it has been given."""
        self._end_reason = reason
        self._changed.set()

    def on_output(self, output: Any) -> None:
        """Take note of a `RequestOutput`: each piece's answer ends with a reason."""
        for answer in getattr(output, "outputs", ()):
            if answer.finish_reason is not None and self._unanswered:
                self._unanswered -= 1
                if not self._unanswered:
                    self.idle_since = time.monotonic()
                    self._changed.set()

    async def pieces(
        self, stream: AsyncIterator[Any], idle_s: float | None
    ) -> AsyncGenerator[Any, None]:
        """The pieces of `stream`, until that ends or the session does.

        Args:
            stream: what the client says. One task runs all of it, as without limits: it may hold
                task groups, timeouts and context variables. It is asked for a piece when the last
                one has been taken.
            idle_s: seconds of idleness after which it ends; `None`: any.
        """
        said: deque[Any] = deque()
        wanted = asyncio.Event()
        is_over = False

        async def read() -> None:
            try:
                async for piece in stream:
                    if is_over:
                        return
                    said.append(piece)
                    self._changed.set()
                    await wanted.wait()
                    wanted.clear()
            finally:
                close = getattr(stream, "aclose", None)
                if close is not None:
                    await close()

        reader = asyncio.ensure_future(read())
        reader.add_done_callback(lambda _: self._changed.set())
        try:
            while await self._goes_on(said, reader, idle_s):
                self._unanswered += 1
                self.idle_since = None
                yield said.popleft()
                wanted.set()
            if reader.done():
                reader.result()  # the client's own error, if it ended with one
            else:
                metrics.count_session_end(self._end_reason or IDLE)
        finally:
            is_over = True
            if not reader.done():
                reader.cancel()
                await asyncio.wait({reader}, timeout=CLOSE_S)
            if reader.done() and not reader.cancelled():
                reader.exception()  # seen: what it says to being ended concerns nobody

    async def _goes_on(
        self, said: deque[Any], reader: asyncio.Future[None], idle_s: float | None
    ) -> bool:
        """Wait for a piece; false when none will come."""
        while not said:
            timeout = None
            if reader.done():
                return False
            if self.idle_since is not None:
                if self._end_reason is not None:
                    return False
                if idle_s is not None:
                    timeout = self.idle_since + idle_s - time.monotonic()
                    if timeout <= 0:
                        return False
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout)
        return True


class Sessions:
    """The open sessions of one front end."""

    def __init__(self, max_sessions: int | None, idle_s: float | None) -> None:
        self.max_sessions = max_sessions
        self.idle_s = idle_s
        self._open: set[Session] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> Session:
        """A place for a new session. Where that is one too many, the one idle longest makes way.

        Raises:
            PolicyError: when none of them is idle.
        """
        longest = None
        leaving = {s.makes_way for s in self._open}
        staying = self._open - leaving
        if self.max_sessions is not None and len(staying) >= self.max_sessions:
            idle = [s for s in staying if s.idle_since is not None]
            if not idle:
                raise PolicyError(
                    "--bounded-kv-max-sessions",
                    self.max_sessions,
                    "sessions are open, and every one of them is being answered; try again later",
                )
            longest = min(idle, key=lambda s: s.idle_since or 0.0)
        session = Session(longest)
        self._open.add(session)
        metrics.set_sessions(len(self))
        return session

    def admit(self, session: Session) -> None:
        """The session has begun: whoever makes way for it ends."""
        longest, session.makes_way = session.makes_way, None
        if longest is not None and longest in self._open:
            longest.end(CAP)
            self.close(longest)

    def close(self, session: Session) -> None:
        """The session no longer counts. Safe to call again."""
        self._open.discard(session)
        metrics.set_sessions(len(self))
