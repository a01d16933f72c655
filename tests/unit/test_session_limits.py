"""When a session is ended for being idle, or to make room for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from support.virtual_time import run_jumping
from vllm_bounded_kv.engine import sessions as sessions_module
from vllm_bounded_kv.engine.policy import PolicyError
from vllm_bounded_kv.engine.sessions import Session, Sessions

IDLE_S = 0.15
LONG_S = 5.0


def finished(reason: str | None = "length") -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason)])


class Talk:
    """A session over a client that is told what to say, and when."""

    def __init__(self, session: Session, idle_s: float | None = IDLE_S) -> None:
        self.session = session
        self.said: asyncio.Queue[int | None] = asyncio.Queue()
        self.heard: list[int] = []
        self.is_closed = False
        self.task = asyncio.ensure_future(self._hear(session.pieces(self._client(), idle_s)))

    async def _client(self) -> AsyncGenerator[int, None]:
        try:
            while (piece := await self.said.get()) is not None:
                yield piece
        finally:
            self.is_closed = True

    async def _hear(self, pieces: AsyncGenerator[int, None]) -> None:
        async for piece in pieces:
            self.heard.append(piece)

    async def say(self, piece: int | None) -> None:
        self.said.put_nowait(piece)
        await asyncio.sleep(0.02)

    async def ended(self, within_s: float = LONG_S) -> bool:
        await asyncio.wait({self.task}, timeout=within_s)
        return self.task.done()


def test_limits_come_from_the_settings() -> None:
    from vllm_bounded_kv.engine.requests import open_sessions

    settings = {"window": 9, "session_idle_s": 2.5, "max_sessions": 3}
    config = {"kv_plugin": "bounded", "bounded_kv": settings}
    sessions = open_sessions(SimpleNamespace(additional_config=config))  # type: ignore[arg-type]
    assert sessions is not None
    assert (sessions.max_sessions, sessions.idle_s) == (3, 2.5)
    assert open_sessions(SimpleNamespace(additional_config={})) is None  # type: ignore[arg-type]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_jumping(test, sessions_module)


def test_a_client_that_ends_ends_the_session() -> None:
    async def test() -> None:
        talk = Talk(Session(), idle_s=None)
        await talk.say(1)
        await talk.say(2)
        await talk.say(None)
        assert await talk.ended() and talk.heard == [1, 2] and talk.is_closed

    run(test)


def test_idle_from_the_last_answer_on() -> None:
    """Not from the last piece: a long answer is no idleness."""

    async def test() -> None:
        talk = Talk(Session())
        await talk.say(1)
        await talk.say(2)
        talk.session.on_output(finished())
        assert not await talk.ended(2 * IDLE_S)  # one answer is still due
        talk.session.on_output(finished(None))
        assert not await talk.ended(2 * IDLE_S)
        talk.session.on_output(finished())
        assert not await talk.ended(IDLE_S / 3)
        assert await talk.ended() and talk.heard == [1, 2] and talk.is_closed

    run(test)


def test_a_piece_in_time_keeps_it_open() -> None:
    async def test() -> None:
        talk = Talk(Session(), idle_s=3 * IDLE_S)
        for piece in range(5):
            await talk.say(piece)
            talk.session.on_output(finished())
            assert not await talk.ended(IDLE_S)
        assert talk.heard == [0, 1, 2, 3, 4]
        assert await talk.ended()

    run(test)


def test_a_session_that_never_says_anything_ends() -> None:
    async def test() -> None:
        talk = Talk(Session())
        assert await talk.ended() and talk.heard == [] and talk.is_closed

    run(test)


def test_without_a_limit_it_stays() -> None:
    async def test() -> None:
        talk = Talk(Session(), idle_s=None)
        assert not await talk.ended(3 * IDLE_S)
        talk.task.cancel()
        await talk.ended()
        assert talk.is_closed

    run(test)


def test_the_clients_generator_is_run_by_one_task() -> None:
    """As without limits: it may hold timeouts, task groups and context variables."""
    variable: ContextVar[int] = ContextVar("variable", default=0)

    async def client() -> AsyncGenerator[int, None]:
        token = variable.set(5)
        async with asyncio.TaskGroup():
            yield 1
            assert variable.get() == 5
            yield 2
        variable.reset(token)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.sleep(LONG_S)
        yield 3

    async def test() -> None:
        assert [piece async for piece in Session().pieces(client(), LONG_S)] == [1, 2, 3]

    run(test)


@pytest.mark.parametrize("how", ["raises", "swallows"])
def test_a_client_that_minds_being_ended(how: str) -> None:
    async def client() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if how == "raises":
                raise RuntimeError("the socket is closed") from None
            yield 2

    async def test() -> None:
        session = Session()
        pieces = session.pieces(client(), IDLE_S)
        assert await anext(pieces) == 1
        session.on_output(finished())
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(pieces), LONG_S)

    run(test)


def test_the_client_is_asked_for_a_piece_when_the_last_was_taken() -> None:
    asked = []

    async def client() -> AsyncGenerator[int, None]:
        for number in range(3):
            asked.append(number)
            yield number

    async def test() -> None:
        pieces = Session().pieces(client(), None)
        assert await anext(pieces) == 0
        await asyncio.sleep(0.02)
        assert asked == [0]
        assert await anext(pieces) == 1
        assert asked == [0, 1]
        await pieces.aclose()

    run(test)


def test_what_is_no_answer_is_ignored() -> None:
    session = Session()
    since = session.idle_since
    session.on_output(ValueError("an error in the queue"))
    session.on_output(SimpleNamespace(outputs=[]))
    session.on_output(finished())
    assert session.idle_since == since


def test_an_error_of_the_clients_comes_through() -> None:
    async def client() -> AsyncGenerator[int, None]:
        yield 1
        raise RuntimeError("gone")

    async def test() -> None:
        pieces = Session().pieces(client(), LONG_S)
        assert await anext(pieces) == 1
        with pytest.raises(RuntimeError, match="gone"):
            await anext(pieces)

    run(test)


def test_one_too_many_ends_the_longest_idle() -> None:
    async def test() -> None:
        sessions = Sessions(max_sessions=2, idle_s=None)
        first, second = (Talk(sessions.open(), None) for _ in range(2))
        for talk in (first, second):
            await talk.say(1)
        second.session.on_output(finished())
        await asyncio.sleep(0.01)
        first.session.on_output(finished())
        refused = sessions.open()
        sessions.close(refused)  # vLLM did not take it: nobody has to go
        assert not await second.ended(0.05)
        third = sessions.open()
        assert third.makes_way is second.session
        sessions.admit(third)
        assert len(sessions) == 2
        assert await second.ended() and second.is_closed
        assert not await first.ended(0.05)
        sessions.close(first.session)
        sessions.close(third)
        sessions.close(third)
        assert len(sessions) == 0
        await first.say(None)
        assert await first.ended()

    run(test)


def test_none_is_ended_in_the_middle_of_an_answer() -> None:
    async def test() -> None:
        sessions = Sessions(max_sessions=1, idle_s=None)
        talk = Talk(sessions.open(), None)
        await talk.say(1)
        with pytest.raises(PolicyError, match=r"--bounded-kv-max-sessions=1: .* try again later"):
            sessions.open()
        assert not await talk.ended(0.05)
        talk.session.on_output(finished())
        sessions.admit(sessions.open())
        assert await talk.ended()

    run(test)
