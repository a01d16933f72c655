"""Limits of sessions: streams that are spoken to in pieces and hold their slot in between.

Lives in the front end, where pieces come in. A session that is ended here has simply no further
input: vLLM finishes its last turn, gives its slot back, and `generate` returns. Imports no vLLM.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

from vllm_bounded_kv import metrics
from vllm_bounded_kv.engine.policy import PolicyError

IDLE, CAP = metrics.END_REASONS


class Session:
    """One stream of input. Idle while every piece it was given has been answered."""

    def __init__(self) -> None:
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
            stream: what the client says.
            idle_s: seconds of idleness after which it ends; `None`: any.
        """
        piece: asyncio.Future[Any] | None = None
        try:
            while True:
                piece = asyncio.ensure_future(anext(stream))  # type: ignore[arg-type]
                await self._until_ended(piece, idle_s)
                if not piece.done():
                    metrics.count_session_end(self._end_reason or IDLE)
                    return
                try:
                    said = piece.result()
                except StopAsyncIteration:
                    return
                self._unanswered += 1
                self.idle_since = None
                yield said
        finally:
            if piece is not None and not piece.done():
                piece.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration):
                    await piece
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    async def _until_ended(self, piece: asyncio.Future[Any], idle_s: float | None) -> None:
        """Return when the piece is there, or when the session is over without it."""
        while not piece.done():
            timeout = None
            if self.idle_since is not None:
                if self._end_reason is not None:
                    return
                if idle_s is not None:
                    timeout = self.idle_since + idle_s - time.monotonic()
                    if timeout <= 0:
                        return
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait(
                {piece, changed}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            changed.cancel()


class Sessions:
    """The open sessions of one front end."""

    def __init__(self, max_sessions: int | None, idle_s: float | None) -> None:
        self.max_sessions = max_sessions
        self.idle_s = idle_s
        self._open: set[Session] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> Session:
        """A new session. Where that is one too many, the one idle longest makes room.

        Raises:
            PolicyError: when none of them is idle.
        """
        if self.max_sessions is not None and len(self._open) >= self.max_sessions:
            idle = [s for s in self._open if s.idle_since is not None]
            if not idle:
                raise PolicyError(
                    "--bounded-kv-max-sessions",
                    self.max_sessions,
                    "sessions are open, and every one of them is being answered; try again later",
                )
            longest = min(idle, key=lambda s: s.idle_since or 0.0)
            longest.end(CAP)
            self.close(longest)
        session = Session()
        self._open.add(session)
        metrics.set_sessions(len(self))
        return session

    def close(self, session: Session) -> None:
        """The session no longer counts. Safe to call again."""
        self._open.discard(session)
        metrics.set_sessions(len(self))
