"""How a server ends: with exit code 1 when its engine has died, and never for want of a reader.

vLLM 0.32 ends a server whose engine core is gone with exit code 0, which tells a supervisor that
all was well. And uvicorn, as vLLM sets it up, waits without end for responses that their clients do
not read: one such client keeps a server from ending, on SIGTERM as well. Imports no vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

_logger = logging.getLogger(__name__)

ENGINE_DIED = 1
"""Exit code. A server that was told to end has vLLM's, 0."""
LOOK_S = 0.2
LEAVE_S = 5.0
"""For responses that go out when nothing more is made: clients may take so long to read them."""


async def watch(engine_client: Any, state: Any) -> None:
    """Run beside an API server until its engine ends, and set `state.bounded_kv_ending` then.

    Args:
        engine_client: an `AsyncLLM`.
        state: the app's; vLLM puts its uvicorn `server` there, after this has begun.

    Raises:
        SystemExit: the engine has died; those who waited for it have been told.
    """
    core = engine_client.engine_core
    while core._finalizer.alive:  # until vLLM's client shuts down, of itself or as it is told
        _limit_leaving(getattr(state, "server", None))
        await asyncio.sleep(LOOK_S)
    state.bounded_kv_ending.set()
    manager = core.resources.engine_manager  # none where another process has the engine
    if getattr(manager, "failed_proc_name", None) is None:
        return
    _logger.error("the engine core has died: the server ends with exit code %d", ENGINE_DIED)
    try:
        async with asyncio.timeout(LEAVE_S):
            await _leave(state)
    except (TimeoutError, asyncio.CancelledError):
        pass  # the second: it has ended meanwhile
    raise SystemExit(ENGINE_DIED)


def _limit_leaving(server: Any) -> None:
    if server is not None and server.config.timeout_graceful_shutdown is None:
        server.config.timeout_graceful_shutdown = LEAVE_S


async def _leave(state: Any) -> None:
    """Take no more requests, and wait for those that are open to end."""
    while (server := getattr(state, "server", None)) is None:  # it has only just started
        await asyncio.sleep(LOOK_S)
    server.should_exit = True
    while server.server_state.connections or server.server_state.tasks:
        await asyncio.sleep(LOOK_S)
