"""A server whose engine dies says so by its exit code; one that is told to ends as vLLM does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bounded_kv_speech.turns import StreamAborted, given, tokens_of
from vllm_bounded_kv.engine import end


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end, "LOOK_S", 0.001)
    monkeypatch.setattr(end, "LEAVE_S", 0.2)


class Server:
    """What there is of vLLM's client and uvicorn's server."""

    def __init__(self, *readers: str) -> None:
        manager = SimpleNamespace(failed_proc_name=None)
        resources = SimpleNamespace(engine_manager=manager)
        finalizer = SimpleNamespace(alive=True)
        core = SimpleNamespace(_finalizer=finalizer, resources=resources)
        self.engine: Any = SimpleNamespace(engine_core=core)
        self.uvicorn: Any = SimpleNamespace(
            should_exit=False,
            config=SimpleNamespace(timeout_graceful_shutdown=None),
            server_state=SimpleNamespace(connections=set(readers), tasks=set()),
        )
        self.state: Any = SimpleNamespace(bounded_kv_ending=asyncio.Event())

    async def run(self, failed: str | None) -> float:
        """Seconds that `watch` took after the engine had ended."""
        watching = asyncio.create_task(end.watch(self.engine, self.state))
        await asyncio.sleep(0.01)
        self.state.server = self.uvicorn  # as vLLM, later
        await asyncio.sleep(0.01)
        assert self.uvicorn.config.timeout_graceful_shutdown == end.LEAVE_S
        assert not self.state.bounded_kv_ending.is_set()
        self.engine.engine_core.resources.engine_manager.failed_proc_name = failed
        self.engine.engine_core._finalizer.alive = False
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(0.02)
        assert self.state.bounded_kv_ending.is_set()
        self.uvicorn.server_state.connections.discard("one that reads")
        await asyncio.wait([watching])
        took = asyncio.get_running_loop().time() - began
        watching.result()
        return took


def test_it_died() -> None:
    server = Server("one that reads")
    with pytest.raises(SystemExit) as ended:
        asyncio.run(server.run("EngineCore"))
    assert ended.value.code == end.ENGINE_DIED
    assert server.uvicorn.should_exit


def test_who_reads_nothing_is_not_waited_for() -> None:
    with pytest.raises(SystemExit):
        asyncio.run(asyncio.wait_for(Server("one that reads nothing").run("EngineCore"), 2.0))


def test_it_was_told_to_end() -> None:
    server = Server()
    assert asyncio.run(server.run(None)) < 1
    assert not server.uvicorn.should_exit, "vLLM sees to that"


def test_a_stream_that_the_engine_aborts_does_not_wait_for_more() -> None:
    """Of a stream of turns vLLM says `abort`, but not that it has ended."""

    async def generate(*_: Any) -> Any:
        part = SimpleNamespace(token_ids=[], finish_reason="abort")
        yield SimpleNamespace(outputs=[part], finished=False)
        await asyncio.sleep(100)

    async def take() -> None:
        engine, params = SimpleNamespace(generate=generate), SimpleNamespace()
        async for _ in tokens_of(engine, "a", params, given([([1], params)])):
            pass

    with pytest.raises(StreamAborted):
        asyncio.run(asyncio.wait_for(take(), 2.0))
