"""The speech routes on a server of their own, in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from bounded_kv_server import routes
from bounded_kv_server.server import SpeechServer
from bounded_kv_server.settings import SpeechSettings
from support.tones import NoPins, Tones

MOST, QUEUE = 3, 2
"""Streams at once, and requests that wait."""


@contextlib.contextmanager
def serving(model: Tones | None, folder: Path, **settings: Any) -> Iterator[tuple[str, Any]]:
    """A server's URL and its `SpeechServer`."""
    app = FastAPI()
    app.state.args = Namespace(log_error_stack=False)
    init_exception_handler(app)
    chosen = SpeechSettings(
        max_audio_streams=MOST, max_audio_queue=QUEUE, voices_dir=str(folder), **settings
    )
    pins = NoPins()
    app.state.bounded_kv_speech = SpeechServer(model, ["tones"], chosen, pins)
    routes.attach(app)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        await app.state.bounded_kv_speech.start()
        yield

    app.router.lifespan_context = lifespan
    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [probe]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield (
            f"http://127.0.0.1:{probe.getsockname()[1]}",
            SimpleNamespace(server=app.state.bounded_kv_speech, pins=pins),
        )
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
