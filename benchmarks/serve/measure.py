"""The rows: one measurement of one server each.

Every function returns the figures of a record; what fails raises `AskError`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import numpy as np

from benchmarks.serve.client import Answer, AskError, ask, metrics, session
from benchmarks.serve.peers import PREEMPTIONS, RUNNING, WAITING, Peer
from benchmarks.serve.prompts import Prompts
from benchmarks.serve.work import Work
from benchmarks.server_processes import family

SAMPLE_S = 0.5
"""Between looks at a loaded server's metrics."""
SETTLE_S = 60.0
"""Longest wait for a loaded server to be idle again."""
LOOK = 8
"""Tokens before its end at which a stream's cache is looked at."""
DRAIN_S = 30.0
"""How long the open loop waits for what it asked; what is not there then has failed."""
Figures = dict[str, Any]


class Measurement:
    """One server, and what to ask of it."""

    def __init__(self, peer: Peer, url: str, pid: int, work: Work, prompts: Prompts) -> None:
        self.peer, self.url, self.pid = peer, url, pid
        self.work, self.prompts = work, prompts

    async def warm_up(self) -> Figures:
        """A short stream beyond the cache, so that no first time is measured."""
        async with session() as http:
            await self._ask(http, self.work.capacity + 8, 4)
        return {}

    async def latency(self, position: float) -> Figures:
        """One stream alone: reading the prompt, the last tokens up to a position, the cache."""
        count = self.work.measured
        held: list[asyncio.Task[dict[str, float]]] = []

        def look(answer: Answer) -> None:
            if len(answer.times) >= count - LOOK and not held:
                held.append(asyncio.create_task(metrics(http, self.url)))

        async with session() as http:
            answer = await self._ask(http, int(position) - count, count, look)
            found = await held[0] if held else {}
        gaps = np.array(answer.gaps_s[: count - LOOK - 1]) * 1e3  # not those beside the look
        return {
            "prefill_s": answer.ttft_s,
            "itl_ms": float(np.median(gaps)),
            "itl_p95_ms": float(np.quantile(gaps, 0.95)),
            "cache_bytes": self.peer.cache_bytes(found, self.work),
        }

    async def closed(self, clients: float) -> Figures:
        """So many clients, each asking again at once; the last streams are left in the middle."""
        begun: dict[int, Answer] = {}
        running: list[float] = []
        failures: list[str] = []
        work = self.work

        async def client() -> None:
            while True:
                try:
                    count = work.length - work.prompt
                    await self._ask(http, work.prompt, count, lambda a: begun.update({id(a): a}))
                except AskError as error:
                    failures.append(str(error))
                    await asyncio.sleep(1)

        async def look() -> None:
            while True:
                running.append((await metrics(http, self.url)).get(RUNNING, 0))
                await asyncio.sleep(SAMPLE_S)

        async with session() as http:
            before = await metrics(http, self.url)
            tasks = [asyncio.create_task(client()) for _ in range(int(clients))]
            tasks.append(asyncio.create_task(look()))
            await asyncio.sleep(work.ramp)
            start, already = time.perf_counter(), _num_tokens(begun)
            await asyncio.sleep(work.seconds)
            took = time.perf_counter() - start
            num_tokens = _num_tokens(begun) - already
            await _cancel(tasks)
            after = await metrics(http, self.url)
            await self._settle(http)
        if failures and not num_tokens:
            raise AskError(failures[0])
        return {
            "tokens_per_s": num_tokens / took,
            "running_peak": max(running, default=0) if RUNNING in after else None,
            "preemptions": _difference(before, after, PREEMPTIONS),
        }

    async def open(self, rate: float) -> Figures:
        """Requests at random (Poisson), `rate` a second, whether or not earlier ones are done."""
        work = self.work
        rng = np.random.default_rng(round(rate * 1000))  # the same arrivals for every peer
        tasks: list[asyncio.Task[Answer]] = []
        async with session() as http:
            start = time.perf_counter()
            due = float(rng.exponential(1 / rate))
            while due < work.seconds:
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                tasks.append(asyncio.create_task(self._ask(http, work.prompt, work.answer)))
                due += float(rng.exponential(1 / rate))
            if tasks:
                await asyncio.wait(tasks, timeout=DRAIN_S)
            done = [t.result() for t in tasks if t.done() and t.exception() is None]
            errors = [str(t.exception()) for t in tasks if t.done() and t.exception()]
            await _cancel(tasks)
            await self._settle(http)
        if errors and not done:
            raise AskError(errors[0])
        good = [a for a in done if a.ttft_s <= work.ttft_s and a.tpot_s <= work.tpot_s]
        gaps = [gap for answer in done for gap in answer.gaps_s]
        return {
            "requests": len(tasks),
            "unfinished": len(tasks) - len(done),
            **_percentiles("ttft_ms", [answer.ttft_s for answer in done]),
            **_percentiles("itl_ms", gaps),
            "goodput_share": len(good) / max(len(tasks), 1),
            "goodput_per_s": len(good) / work.seconds,
        }

    async def memory(self, _: float) -> Figures:
        """Of all its processes, after what it has done so far."""
        rss = pss = 0
        for process in family(self.pid):
            info = process.memory_full_info()
            rss, pss = rss + info.rss, pss + info.pss
        return {"rss_bytes": rss, "pss_bytes": pss}

    async def _settle(self, http: aiohttp.ClientSession) -> None:
        """Wait until the server has noticed that nobody listens any more."""
        end = time.perf_counter() + SETTLE_S
        while time.perf_counter() < end:
            found = await metrics(http, self.url)
            if not found.get(RUNNING, 0) + found.get(WAITING, 0):
                return
            await asyncio.sleep(SAMPLE_S)

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        prompt_len: int,
        num_tokens: int,
        on_token: Callable[[Answer], Any] | None = None,
    ) -> Answer:
        body = self.peer.body(self.prompts.take(prompt_len), num_tokens)
        return await ask(http, self.url, body, on_token)


Row = Callable[[Measurement, float], Coroutine[Any, Any, Figures]]
ROWS: dict[str, Row] = {
    "latency": Measurement.latency,
    "closed": Measurement.closed,
    "open": Measurement.open,
    "memory": Measurement.memory,
}


def _num_tokens(answers: dict[int, Answer]) -> int:
    return sum(len(answer.times) for answer in answers.values())


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _difference(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    return after[name] - before.get(name, 0) if name in after else None


def _percentiles(name: str, seconds: list[float]) -> Figures:
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {
        f"{name}_{key}": float(np.quantile(seconds, share)) * 1e3 if seconds else None
        for key, share in shares.items()
    }
