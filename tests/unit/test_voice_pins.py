"""Voices as pinned sources, with the engine's own bookkeeping and no engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from bounded_kv_server.pins import EnginePins
from vllm_bounded_kv.engine.sources import PinnedSources, SourceError, handle

A, B, C = [1, 1], [2, 2], [3, 3]
"""A block each."""
SHORT, LOST = [1], [6, 6]


class Pool:
    """Of blocks that have been computed."""

    def __init__(self) -> None:
        self.computed: set[Any] = set()

    def get_cached_block(self, block_hash: Any, groups: list[int]) -> list[Any] | None:
        return [block_hash] if block_hash in self.computed else None

    def touch(self, blocks: list[Any]) -> None:
        pass

    def free_blocks(self, blocks: Any) -> None:
        self.computed -= set(blocks)


class Engine:
    """Its client. Sources are read when `go_on` is set."""

    def __init__(self, max_blocks: int) -> None:
        self.pool: Any = Pool()
        self.sources = PinnedSources(self.pool, max_blocks, block_size=2, block_bytes=1)
        self.engine_core = self
        self.engine_ranks_managed, self.errored = [0], False
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.num_reading = self.num_adds = 0
        self.read: list[list[int]] = []

    def pinned(self) -> list[list[int]]:
        return [source.token_ids for source in self.sources.of_tenant(None)]

    async def call_utility_all_async(
        self, method: str, action: str, values: dict[str, Any]
    ) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        self.num_adds += action == "add"
        return [handle(self.sources, action, values, self.hashes)]

    def hashes(self, tokens: list[int], salt: Any, field: str) -> Any:
        if tokens == SHORT:
            raise SourceError(400, field, "fills no block")
        return [tuple(tokens)]

    async def generate(self, prompt: Any, *_: Any, **__: Any) -> AsyncGenerator[Any]:
        tokens = list(prompt["prompt_token_ids"])
        if tokens == LOST:
            raise RuntimeError("the request was lost")
        self.num_reading += 1
        if tokens == A:
            await self.go_on.wait()
        self.read.append(tokens)
        self.pool.computed.add(tuple(tokens))
        self.sources.settle()
        yield SimpleNamespace()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 5))


def test_those_used_longest_ago_go_where_there_is_no_room() -> None:
    async def test() -> None:
        engine = Engine(2)
        pins = EnginePins(engine)
        for tokens in (A, B, A, C):
            await pins.use(tokens)
        assert sorted(engine.pinned()) == [A, C]
        await pins.drop(A)
        assert engine.pinned() == [C]

    run(test())


def test_without_any_room_nothing_is_pinned() -> None:
    async def test() -> None:
        engine = Engine(0)
        await EnginePins(engine).use(A)
        assert engine.pinned() == []

    run(test())


def test_one_that_is_read_holds_up_no_other() -> None:
    async def test() -> None:
        engine = Engine(9)
        pins = EnginePins(engine)
        engine.go_on.clear()
        slow = [asyncio.create_task(pins.use(A)) for _ in range(3)]
        await asyncio.sleep(0.01)
        await asyncio.wait_for(pins.use(B), 1)
        assert engine.read == [B]
        assert engine.num_reading == 2  # the same tokens once
        engine.go_on.set()
        await asyncio.gather(*slow)
        assert engine.read == [B, A]

    run(test())


@pytest.mark.parametrize("tokens", [SHORT, LOST])
def test_what_fails_otherwise_is_logged_and_no_other_goes(
    tokens: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        engine = Engine(1)
        pins = EnginePins(engine)
        await pins.use(A)
        engine.sources.max_blocks = 2
        await pins.use(tokens)
        assert engine.pinned() == [A]
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        num_adds = engine.num_adds
        await pins.use(tokens)
        # What can never be is not asked for again.
        assert engine.num_adds == num_adds + (tokens != SHORT)

    run(test())
