"""Two engines side by side, each in a process of its own, measured in turns.

Machines are noisy, so nothing is measured once: the same task goes to both engines alternately,
and what is reported are medians and their ratio.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class EngineSetup:
    """How to build one engine."""

    model: str
    bounded: dict[str, Any] | None
    """Settings of the bounded cache; `None`: stock vLLM."""
    max_model_len: int
    pool_bytes: int
    max_num_seqs: int = 32
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A batch of equal requests: random prompts of `prompt_len`, `max_tokens` generated each."""

    num_requests: int
    prompt_len: int
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """What one engine has done with a task so far."""

    seconds: float
    """Since the task began."""
    step_s: list[float]
    """Duration of each engine step since the last measurement."""
    num_tokens: int
    """Generated in all by requests that have ended."""
    peak_running: int
    """Most requests that had all their tokens in the cache at once."""
    num_preemptions: int


class BenchEngine:
    """An engine in its own process."""

    def __init__(self, setup: EngineSetup) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(setup, child), daemon=True)
        self._process.start()
        child.close()

    def wait_ready(self) -> None:
        """Block until the engine is built."""
        self._receive()

    def begin(self, task: Task) -> float:
        """Begin a task from an empty prefix cache; returns the seconds to its first token."""
        self._connection.send(task)
        seconds: float = self._receive()
        return seconds

    def go_on(self, num_steps: int | None = None) -> Measured:
        """So many more steps of the task, or all that are left."""
        self._connection.send(num_steps)
        measured: Measured = self._receive()
        return measured

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(20)
        self._process.kill()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError("a benchmark engine ended; see its output above") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def engines(setups: dict[str, EngineSetup]) -> Iterator[dict[str, BenchEngine]]:
    """Build engines one after the other and end them all."""
    built: dict[str, BenchEngine] = {}
    try:
        for name, setup in setups.items():
            built[name] = BenchEngine(setup)
            built[name].wait_ready()
        yield built
    finally:
        for engine in built.values():
            engine.close()


def _serve(setup: EngineSetup, connection: Connection) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the idle engine must not spin
    try:
        llm = _build(setup)
        connection.send("ready")
        running: _Running | None = None
        while True:
            message = connection.recv()
            if isinstance(message, Task):
                running = _Running(llm, message)
                connection.send(running.seconds_to_first_token())
            else:
                assert running is not None
                connection.send(running.go_on(message))
    except EOFError:
        return
    except Exception as error:  # to the parent, which knows what it asked for
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _build(setup: EngineSetup) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {
        "model": setup.model,
        "dtype": "float32",
        "max_model_len": setup.max_model_len,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": setup.pool_bytes,
        "disable_log_stats": True,
        "enforce_eager": True,
        **setup.options,
    }
    if setup.bounded is not None:
        options["additional_config"] = {"kv_plugin": "bounded", "bounded_kv": setup.bounded}
    return LLM(**options)


class _Running:
    """A task on an engine, step by step."""

    def __init__(self, llm: Any, task: Task) -> None:
        import numpy as np
        from vllm import SamplingParams

        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.scheduler.reset_prefix_cache()
        vocab = self.engine.model_config.get_vocab_size()
        rng = np.random.default_rng(task.seed)
        params = SamplingParams(temperature=0, max_tokens=task.max_tokens, ignore_eos=True)
        for i in range(task.num_requests):
            prompt = {"prompt_token_ids": rng.integers(10, vocab, task.prompt_len).tolist()}
            self.engine.add_request(f"{time.monotonic_ns()}-{i}", prompt, params)
        self.requests = list(self.scheduler.requests.values())
        self.start = time.perf_counter()
        self.num_tokens = 0
        self.peak_running = 0

    def _step(self) -> Any:
        outputs = self.engine.step()
        self.num_tokens += sum(len(o.outputs[0].token_ids) for o in outputs if o.finished)
        ready = sum(not r.is_prefill_chunk for r in self.scheduler.running)
        self.peak_running = max(self.peak_running, ready)
        return outputs

    def seconds_to_first_token(self) -> float:
        while not self._step():
            pass
        return time.perf_counter() - self.start

    def go_on(self, num_steps: int | None) -> Measured:
        steps: list[float] = []
        while self.engine.has_unfinished_requests() and len(steps) != num_steps:
            before = time.perf_counter()
            self._step()
            steps.append(time.perf_counter() - before)
        return Measured(
            seconds=time.perf_counter() - self.start,
            step_s=steps,
            num_tokens=self.num_tokens,
            peak_running=self.peak_running,
            num_preemptions=sum(r.num_preemptions for r in self.requests),
        )
