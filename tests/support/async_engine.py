"""Real `AsyncLLM`s on an event loop of their own, for tests that are not coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_bounded_kv.engine.endpoint import fetch_figures
from vllm_bounded_kv.engine.replicas import all_figures


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop; what is left on it at the end is cancelled."""
    loop = asyncio.new_event_loop()
    yield loop
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()


@contextmanager
def running_llm(loop: asyncio.AbstractEventLoop, args: AsyncEngineArgs) -> Iterator[AsyncLLM]:
    """An engine, built on the loop that it is to be used on."""

    async def build() -> AsyncLLM:
        return AsyncLLM.from_engine_args(args)

    llm = loop.run_until_complete(build())
    yield llm
    llm.shutdown()


async def figures(llm: AsyncLLM) -> dict[str, Any]:
    """The plugin's figures, as `GET /v1/bounded_kv` shows them."""
    return all_figures(await fetch_figures(llm))
