"""A socket's client without a network, in a loop whose clock jumps: no machine is too slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fastapi import FastAPI, WebSocket

from bounded_kv_server.conversation import converse
from bounded_kv_server.server import SpeechServer
from bounded_kv_server.settings import SpeechSettings
from support.tones import NoPins, Tones
from support.virtual_time import JumpingLoop


class AtOnce(Executor):
    """Does in the caller's thread what there is to do: a thread's time is not the loop's."""

    def __init__(self, *_: Any) -> None:
        """As a pool of threads."""

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Line:
    """A client that takes what it is sent while `reads` is set."""

    def __init__(self, server: SpeechServer) -> None:
        self._app = FastAPI()
        self._app.state.bounded_kv_speech = server
        self._to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._to_server.put_nowait({"type": "websocket.connect"})
        self.reads = asyncio.Event()
        self.reads.set()
        self.sound: list[bytes] = []
        self.told: list[dict[str, Any]] = []
        self.at: dict[str, float] = {}
        """When a message of each type came last, and `sound`."""

    async def __call__(self) -> None:
        """The socket's life, as the server has it."""
        scope = {"type": "websocket", "app": self._app, "path": "/", "headers": []}
        await converse(WebSocket(scope, self._to_server.get, self._send))

    def say(self, kind: str, **values: Any) -> None:
        text = json.dumps({"type": kind, **values})
        self._to_server.put_nowait({"type": "websocket.receive", "text": text})

    def leave(self) -> None:
        self._to_server.put_nowait({"type": "websocket.disconnect", "code": 1001})

    async def hear(self, kind: str) -> None:
        """Wait for a message of that type, or `sound`."""
        await until(lambda: kind in self.at)

    @property
    def error(self) -> str:
        return "".join(m["error"]["message"] for m in self.told if m["type"] == "error")

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        now = asyncio.get_running_loop().time()
        if message.get("bytes") is not None:
            self.sound.append(message["bytes"])
            self.at["sound"] = now
        elif message.get("text") is not None:
            self.told.append(json.loads(message["text"]))
            self.at[self.told[-1]["type"]] = now


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(1000):
        while not condition():
            await asyncio.sleep(0.01)


def speech_server(model: Tones, folder: Path, **settings: Any) -> SpeechServer:
    chosen = SpeechSettings(voices_dir=str(folder), **settings)
    with patch("bounded_kv_server.server.ThreadPoolExecutor", AtOnce):
        return SpeechServer(model, ["tones"], chosen, NoPins())


@contextlib.asynccontextmanager
async def talking(server: SpeechServer, **config: Any) -> AsyncIterator[tuple[Line, Any]]:
    """A client that has said how it wants things said, and the task of its socket."""
    line = Line(server)
    line.say("session.config", **config)
    task = asyncio.create_task(line())
    try:
        yield line, task
    finally:
        line.reads.set()
        line.leave()
        async with asyncio.timeout(1000):
            await asyncio.gather(task, return_exceptions=True)


def run(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(test)
