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
    """What one engine did with one task."""

    seconds: float
    first_token_s: float
    """From the start to the first token of the first request to produce one."""
    step_s: list[float]
    """Duration of each engine step after that."""
    num_tokens: int
    """Generated in all."""
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

    def run(self, task: Task) -> Measured:
        """Run a task from an empty prefix cache."""
        self._connection.send(task)
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
        while True:
            connection.send(_run(llm, connection.recv()))
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


def _run(llm: Any, task: Task) -> Measured:
    import numpy as np
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.reset_prefix_cache()
    vocab = llm.llm_engine.model_config.get_vocab_size()
    rng = np.random.default_rng(task.seed)
    params = SamplingParams(temperature=0, max_tokens=task.max_tokens, ignore_eos=True)
    for i in range(task.num_requests):
        prompt = rng.integers(10, vocab, task.prompt_len).tolist()
        engine.add_request(f"{time.monotonic_ns()}-{i}", {"prompt_token_ids": prompt}, params)
    start = time.perf_counter()
    first_token, steps, num_tokens, peak, preemptions = None, [], 0, 0, 0
    requests = list(scheduler.requests.values())
    while engine.has_unfinished_requests():
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        if first_token is None:
            first_token = now - start if outputs else None
        else:
            steps.append(now - before)
        num_tokens += sum(len(o.outputs[0].token_ids) for o in outputs if o.finished)
        peak = max(peak, sum(not r.is_prefill_chunk for r in scheduler.running))
    preemptions = sum(r.num_preemptions for r in requests)
    return Measured(
        seconds=time.perf_counter() - start,
        first_token_s=first_token or 0.0,
        step_s=steps,
        num_tokens=num_tokens,
        peak_running=peak,
        num_preemptions=preemptions,
    )
