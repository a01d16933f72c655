"""A real vLLM engine in this process, driven step by step, for exactness tests."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.oracle_llama import (
    OracleLlama,
    Rebase,
    TokenReport,
    assert_exact,
    bounded_mask,
    check_tokens,
)

LOGPROB_TOL = 1e-3
"""fp32 engine against the float64 oracle, in natural-log units. Most of it is vLLM's fp32 rotary
table, whose angles are off by about 2e-4 at position 3,000; typical errors are below 1e-4."""

POOL_BYTES = 8 << 20
"""170 blocks of the tiny model. All of them are filled with NaN and counted at every step, so what
no test uses costs most of the step's time; sixteen of the largest slots take 5 MiB."""


@dataclass(frozen=True)
class Ask:
    """One request: a prompt, how much to generate, and its `kv_` arguments."""

    prompt: list[int]
    max_tokens: int = 40
    args: dict[str, Any] = field(default_factory=dict)
    salt: str | None = None
    adapter: Any = None
    """A `LoRARequest`; `None`: the base model."""


@dataclass(frozen=True)
class Answer:
    """Generated tokens and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]
    num_cached: int


class Engine:
    """An `LLM` plus what tests need to see inside it.

    One at a time: an engine that ends destroys the process groups of all in its process.
    """

    alive = False

    def __init__(self, model: Path, bounded: dict[str, Any] | None, **kwargs: Any) -> None:
        from vllm import LLM

        assert not Engine.alive, "close the engine before: it would end this one's process groups"
        let_vllm_look_through_modules()
        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": POOL_BYTES,
            "disable_log_stats": True,
            "seed": 0,
            **kwargs,
        }
        if bounded is not None:
            extra = settings.pop("additional_config", {})
            settings["additional_config"] = {
                "kv_plugin": "bounded",
                "bounded_kv": bounded,
                **extra,
            }
        self.llm = LLM(model=str(model), **settings)
        Engine.alive = True
        self.engine = self.llm.llm_engine
        self._next_id = 0
        if bounded is not None:
            assert hasattr(self.scheduler, "bounded_policy"), "the plugin is not installed"

    @property
    def core(self) -> Any:
        return self.engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def runner(self) -> Any:
        return self.engine.model_executor.driver_worker.worker.model_runner

    @contextmanager
    def chunk(self, num_tokens: int | None) -> Iterator[None]:
        """Schedule at most `num_tokens` a step."""
        before = self.scheduler.max_num_scheduled_tokens
        if num_tokens is not None:
            self.scheduler.max_num_scheduled_tokens = num_tokens
        try:
            yield
        finally:
            self.scheduler.max_num_scheduled_tokens = before

    def free_block_ids(self) -> list[int]:
        """Every block that nobody holds, and that no prefix hit can bring back."""
        return [
            block.block_id
            for block in self.pool.blocks
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null
        ]

    def poison_free_blocks(self) -> None:
        """Fill the free blocks with NaN."""
        free = self.free_block_ids()
        for cache in self.runner.kv_caches:
            cache[free] = float("nan")

    def add(self, ask: Ask) -> str:
        from vllm import SamplingParams

        self._next_id += 1
        params = SamplingParams(
            temperature=0,
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            logprobs=0,
            extra_args=ask.args or None,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": ask.prompt}
        if ask.salt is not None:
            prompt["cache_salt"] = ask.salt
        request_id = str(self._next_id)
        added = self.engine.add_request(request_id, prompt, params, lora_request=ask.adapter)
        return added or request_id

    def run(
        self,
        asks: Sequence[Ask],
        *,
        chunk: int | None = None,
        poison: bool = True,
        on_step: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Run requests to their end, checking the pool after every step, and what is left of it.

        Args:
            asks: requests, all added before the first step.
            chunk: tokens a step.
            poison: fill free blocks with NaN before every step.
            on_step: called with the step's number before it.
        """
        with self.chunk(chunk):
            ids = [self.add(ask) for ask in asks]
            finals = self.drain(poison=poison, on_step=on_step)
        by_prefix = {key.split("-")[0]: value for key, value in finals.items()}
        return [by_prefix[request_id.split("-")[0]] for request_id in ids]

    def drain(
        self, *, poison: bool = True, on_step: Callable[[int], None] | None = None
    ) -> dict[str, Answer]:
        finals: dict[str, Answer] = {}
        step = 0
        while self.engine.has_unfinished_requests():
            if on_step is not None:
                on_step(step)
            if poison:
                self.poison_free_blocks()
            for output in self.engine.step():
                if output.finished:
                    generated = output.outputs[0]
                    logprobs = generated.logprobs or []
                    finals[output.request_id] = Answer(
                        list(generated.token_ids),
                        [
                            row[token].logprob
                            for row, token in zip(logprobs, generated.token_ids, strict=True)
                        ],
                        output.num_cached_tokens or 0,
                    )
            self.check()
            step += 1
        self.check_all_free()
        return finals

    def check(self) -> None:
        if hasattr(self.scheduler, "check_integrity"):
            self.scheduler.check_integrity()

    def check_all_free(self) -> None:
        """Every block is back in the pool, but those that sources pin."""
        free, total = self.pool.get_num_free_blocks(), self.pool.num_gpu_blocks - 1
        if hasattr(self.scheduler, "sources"):
            total -= len(list(self.scheduler.sources.blocks()))
        assert free == total, f"{total - free} of {total} blocks were not given back"

    def forget_prefixes(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Give the memory back, so that the next engine of this process can be built."""
        self.engine.engine_core.shutdown()
        Engine.alive = False
        del self.engine, self.llm
        gc.collect()


def let_vllm_look_through_modules() -> None:
    """An engine that starts on a CPU asks everything in every module for its `__dict__`, and stops
    at llvmlite's `lib`, which has one of any name. N-gram drafts import it (numba), so without
    this no engine could follow one with drafts in the same process."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None:
        return
    kind = ffi._lib_wrapper
    attribute = kind.__getattr__
    if getattr(attribute, "is_ours", False):
        return

    def no_dunders(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return attribute(self, name)

    no_dunders.is_ours = True  # type: ignore[attr-defined]
    kind.__getattr__ = no_dunders


def judge(
    oracle: OracleLlama,
    ask: Ask,
    answer: Answer,
    sink: int,
    window: int,
    includes_step: bool = True,
    limit: int | None = None,
    verdict: Callable[..., TokenReport] = check_tokens,
) -> TokenReport:
    """The answer against the oracle's under that retention.

    Args:
        limit: where rotary positions fall back; `None`: nowhere.
        verdict: `assert_exact` to raise unless it is exact.
    """
    return verdict(
        oracle,
        ask.prompt,
        answer.tokens,
        lambda n: bounded_mask(n, sink, window, includes_step),
        logprobs=answer.logprobs,
        logprob_tol=LOGPROB_TOL,
        rebase=None if limit is None else Rebase(sink, sink + window, limit),
    )


def expect_exact(
    oracle: OracleLlama,
    ask: Ask,
    answer: Answer,
    sink: int,
    window: int,
    includes_step: bool = True,
    limit: int | None = None,
) -> None:
    """The answer is the oracle's under that retention, token for token (see `judge`)."""
    assert len(answer.tokens) == ask.max_tokens
    judge(oracle, ask, answer, sink, window, includes_step, limit, verdict=assert_exact)
