"""One long stream beside short ones, over HTTP, and the server read at fixed tokens of it.

Readings are made beside the stream but counted by its tokens: each must be in before the next is
due, so their number does not depend on how fast anything is.
"""

from __future__ import annotations

import json
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from benchmarks.server_processes import usage
from benchmarks.soak_verdict import Arrivals, Reading
from benchmarks.sse import TIMEOUT_S, Completion, StreamError, whole_completion

LONG_ID = "soak-long"
PROMPT_TOKENS = 32
BESIDE_PROMPT_TOKENS = (16, 64)
BESIDE_TOKENS = (200, 400)
SMALL_INTS = 257
"""CPython keeps the integers below this once and for all; every other one in a list is an object
of its own."""


@dataclass(frozen=True)
class Plan:
    """What is run."""

    model: str
    """The name that the server serves."""
    tokens: int
    """Of the long stream."""
    beside: int
    """Short streams at any time."""
    token_ids: range
    """What prompts are made of."""
    step_tokens: int
    """Most tokens that the server gives one step."""
    num_readings: int
    fresh_tokens: int = 0
    """Of a second long stream, begun when the first has ended; 0: none."""
    seed: int = 0


@dataclass(frozen=True)
class Soaked:
    """What was seen."""

    readings: list[Reading]
    arrivals: Arrivals
    fresh: Arrivals | None
    """Of a new stream, right after the end of the long one."""
    leftover_blocks: int
    seconds: float
    """That the long stream took."""
    num_beside: int
    """Short streams that have run to their end meanwhile."""
    share_of_large_ids: float
    """Share of the long stream's token ids that are no small integers of CPython's."""
    num_chars: int
    """Of the long stream's text."""


@dataclass(frozen=True)
class Progress:
    """The long stream so far."""

    tokens: int
    itl_ms: float
    """Mean since the last progress."""
    reading: Reading


def soak(
    url: str, pid: int, plan: Plan, on_progress: Callable[[Progress], None] | None = None
) -> Soaked:
    """Run the plan against the server at `url`, whose first process is `pid`.

    Raises:
        StreamError: when any stream is refused or breaks off.
    """
    _warm_up(url, plan)
    watched = _Watched(url, pid, plan, on_progress)
    with _beside(url, plan) as beside:
        start = time.perf_counter()
        watched.follow(beside)
        seconds = time.perf_counter() - start
        num_beside = beside.num_ended
        fresh = _follow_fresh(url, plan) if plan.fresh_tokens else None
    return Soaked(
        readings=watched.readings,
        arrivals=watched.arrivals,
        fresh=fresh,
        leftover_blocks=_leftover_blocks(url),
        seconds=seconds,
        num_beside=num_beside,
        share_of_large_ids=watched.num_large_ids / plan.tokens,
        num_chars=watched.num_chars,
    )


def _warm_up(url: str, plan: Plan) -> None:
    """One step of every size.

    vLLM's CPU kernels keep code for each number of tokens that a step has had, 2 MB each with the
    tiny model. Rare ones would turn up hours later, and look like memory of the stream.
    """
    rng = random.Random(plan.seed)
    for length in range(1, plan.step_tokens + 1):
        prompt = _prompt(rng, plan.token_ids, length)
        with Completion(url, plan.model, prompt, 1, "soak-warm-up") as stream:
            for _ in stream.pieces():
                pass


def figures(url: str) -> dict[str, Any]:
    """`GET /v1/bounded_kv`; again while the engine is too busy to answer."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urlopen(f"{url}/v1/bounded_kv", timeout=TIMEOUT_S) as response:
                values: dict[str, Any] = json.load(response)
                return values
        except HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                raise


def _prompt(rng: random.Random, token_ids: range, length: int) -> list[int]:
    return [rng.choice(token_ids) for _ in range(length)]


class _Watched:
    """The long stream, with the server read at equal distances of it."""

    def __init__(
        self, url: str, pid: int, plan: Plan, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self.url, self.pid, self.plan, self.on_progress = url, pid, plan, on_progress
        self.readings: list[Reading] = []
        self.num_large_ids = 0
        self.num_chars = 0
        self._seconds, self._counts = array("d"), array("L")
        self._shown = (0, 0.0)

    @property
    def arrivals(self) -> Arrivals:
        return Arrivals(self._seconds, self._counts)

    def follow(self, beside: _Beside) -> None:
        """Read the stream to its end."""
        plan = self.plan
        marks = [i * plan.tokens // plan.num_readings for i in range(plan.num_readings)]
        tokens, due = 0, 0
        pending: Future[Reading] | None = None
        prompt = _prompt(random.Random(plan.seed), plan.token_ids, PROMPT_TOKENS)
        with (
            ThreadPoolExecutor(1) as reader,
            Completion(self.url, plan.model, prompt, plan.tokens, LONG_ID) as stream,
        ):
            for piece in stream.pieces():
                tokens += len(piece.token_ids)
                self._seconds.append(piece.seconds)
                self._counts.append(len(piece.token_ids))
                self.num_large_ids += sum(token >= SMALL_INTS for token in piece.token_ids)
                self.num_chars += len(piece.text)
                if due < len(marks) and tokens > marks[due]:
                    due = sum(mark < tokens for mark in marks)
                    beside.check()
                    self._take(pending, tokens)
                    pending = reader.submit(self._read, tokens)
            self._take(pending, tokens)

    def _read(self, tokens: int) -> Reading:
        used = usage(self.pid)
        shown = figures(self.url)
        blocks = [s["blocks"] for s in shown["streams"] if LONG_ID in s["request_id"]]
        return Reading(
            tokens=tokens,
            blocks=sum(blocks),
            slots_used=shown["slots_used"],
            rss={name: process.rss for name, process in used.items()},
            cpu_s={name: process.cpu_s for name, process in used.items()},
        )

    def _take(self, pending: Future[Reading] | None, num_tokens: int) -> None:
        """Wait for a reading, keep it and show it, with the tokens there are by now."""
        if pending is None:
            return
        reading = pending.result()
        self.readings.append(reading)
        if self.on_progress is not None:
            (before, since), now = self._shown, self._seconds[-1]
            itl_ms = (now - (since or self._seconds[0])) / max(num_tokens - before, 1) * 1e3
            self._shown = num_tokens, now
            self.on_progress(Progress(num_tokens, itl_ms, reading))


def _follow_fresh(url: str, plan: Plan) -> Arrivals:
    seconds, counts = array("d"), array("L")
    prompt = _prompt(random.Random(plan.seed + 1), plan.token_ids, PROMPT_TOKENS)
    with Completion(url, plan.model, prompt, plan.fresh_tokens, "soak-fresh") as stream:
        for piece in stream.pieces():
            seconds.append(piece.seconds)
            counts.append(len(piece.token_ids))
    return Arrivals(seconds, counts)


class _Beside:
    """Short streams, each replaced when it ends. Their answers come whole: sent token by token they
    would take the front end more time than everything that is to be seen here."""

    def __init__(self, url: str, plan: Plan) -> None:
        self.url, self.plan = url, plan
        self.num_ended = 0
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(plan.beside)
        ]

    def start(self) -> None:
        """Begin, and wait until all of them have: the long stream is then none of the first."""
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + TIMEOUT_S
        while figures(self.url)["slots_used"] < self.plan.beside:
            self.check()
            if time.monotonic() > deadline:
                raise StreamError(f"not {self.plan.beside} streams beside within {TIMEOUT_S} s")
            time.sleep(0.05)

    def stop(self) -> None:
        """Let the streams that run end, and wait for their threads."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)

    def check(self) -> None:
        """Raise what has gone wrong in any of them."""
        if self._errors:
            raise self._errors[0]

    def _run(self, index: int) -> None:
        rng = random.Random(f"{self.plan.seed} {index}")
        try:
            while not self._stopped.is_set():
                self._one(rng, f"soak-beside-{index}")
        except BaseException as error:  # to the thread that asks
            self._errors.append(error)

    def _one(self, rng: random.Random, request_id: str) -> None:
        prompt = _prompt(rng, self.plan.token_ids, rng.randint(*BESIDE_PROMPT_TOKENS))
        max_tokens = rng.randint(*BESIDE_TOKENS)
        whole_completion(self.url, self.plan.model, prompt, max_tokens, request_id)
        with self._lock:
            self.num_ended += 1


@contextmanager
def _beside(url: str, plan: Plan) -> Iterator[_Beside]:
    beside = _Beside(url, plan)
    try:
        beside.start()
        yield beside
        beside.check()
    finally:
        beside.stop()


def _leftover_blocks(url: str, timeout_s: float = TIMEOUT_S) -> int:
    """Blocks still held when every stream has had time to end."""
    deadline = time.monotonic() + timeout_s
    while True:
        shown = figures(url)
        held: int = shown["pool_blocks"] - shown["pool_blocks_free"]
        if (held == 0 and not shown["streams"]) or time.monotonic() > deadline:
            return held
        time.sleep(0.05)
