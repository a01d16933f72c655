"""What a socket's client is sent: a client that does not read is taken to have left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect

from bounded_kv_server.limits import within

GONE = 1006
"""WebSocket close code: there was no closing."""


class Outbox:
    """Sound and messages to a client, each sent within `limit_s`.

    Raises:
        WebSocketDisconnect: by each call, when the client has left or does not read.
    """

    def __init__(self, socket: WebSocket, limit_s: float) -> None:
        self._socket, self._limit_s = socket, limit_s
        self._num_sending = 0

    @property
    def is_sending(self) -> bool:
        """Whether something waits for the client to read."""
        return self._num_sending > 0

    async def sound(self, data: bytes) -> None:
        """Send encoded sound; none if there is none."""
        if data:
            async with self._sending():
                await self._socket.send_bytes(data)

    async def tell(self, kind: str, **values: Any) -> None:
        """Send a message."""
        async with self._sending():
            await self._socket.send_json({"type": kind, **values})

    async def close(self, code: int = 1000) -> None:
        """Close the socket."""
        async with self._sending():
            await self._socket.close(code)

    @asynccontextmanager
    async def _sending(self) -> AsyncIterator[None]:
        self._num_sending += 1
        try:
            async with within(self._limit_s, WebSocketDisconnect(GONE)):
                yield
        finally:
            self._num_sending -= 1
