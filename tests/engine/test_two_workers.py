"""Two workers, over gloo: they share every layer's heads (`--tensor-parallel-size 2`), or share
out the layers (`--pipeline-parallel-size 2`).

The scheduler stands in this process, the workers in two of their own: they are asked for the block
rows that they hold. Free blocks are NaN in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_llama import TinyLlama, random_prompt
from support.engine import Ask, Engine, expect_exact
from support.oracle_llama import OracleLlama
from vllm_bounded_kv.engine.header import HEADER_LEN

SINK, WINDOW, MAX_SOURCE = 5, 60, 64
LIMIT = 200
BLOCK = 32


def block_rows(worker: Any) -> dict[str, list[int]]:
    """Run in a worker: its block row of every request, header included."""
    batch = worker.model_runner.input_batch
    (table,) = batch.block_table.block_tables
    return {
        request_id: table.block_table.np[i, : table.num_blocks_per_row[i]].tolist()
        for request_id, i in batch.req_id_to_index.items()
    }


def poison(worker: Any, free: list[int]) -> list[tuple[int, ...]]:
    """Run in a worker: fill blocks with NaN; returns the shapes of its caches."""
    for cache in worker.model_runner.kv_caches:
        cache[free] = float("nan")
    return [tuple(cache.shape) for cache in worker.model_runner.kv_caches]


class TwoWorkers(Engine):
    """An engine whose workers are other processes."""

    def on_workers(self, function: Any, *args: Any) -> list[Any]:
        answers: list[Any] = self.engine.model_executor.collective_rpc(function, args=args)
        assert len(answers) == 2
        return answers

    def poison_free_blocks(self) -> None:
        self.on_workers(poison, self.free_block_ids())


@pytest.fixture(
    scope="module",
    params=["tensor, rebase", "tensor, absolute", "pipeline, rebase"],
)
def two_workers(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[TwoWorkers]:
    parallel, positions = request.param.split(", ")
    policy = {
        "sink": SINK,
        "window": WINDOW,
        "max_source_len": MAX_SOURCE,
        "positions": positions,
        **({"position_limit": LIMIT} if positions == "rebase" else {}),
    }
    settings = {
        f"{parallel}_parallel_size": 2,
        # vLLM's CPU runner hands nothing to the next stage unless it has warmed up to compile.
        "enforce_eager": parallel == "tensor",
    }
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise vLLM wants a NUMA node for each worker, and binds its threads there.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        engine = TwoWorkers(tiny_model, policy, **settings)
    yield engine
    engine.close()


@pytest.fixture
def engine(two_workers: TwoWorkers) -> Iterator[TwoWorkers]:
    two_workers.forget_prefixes()
    yield two_workers
    two_workers.check_all_free()


@pytest.fixture
def limit(engine: TwoWorkers) -> int | None:
    value: int | None = engine.scheduler.bounded_policy.position_limit
    return value


def test_exact_through_wraps_and_boundaries(
    engine: TwoWorkers, oracle: OracleLlama, limit: int | None
) -> None:
    """Decoding, chunked prefills that wrap, policies of their own, and a shared source, at once."""
    source = random_prompt(MAX_SOURCE, seed=99)
    shared = {"kv_source_len": MAX_SOURCE}
    asks = [
        Ask(random_prompt(20, seed=1), LIMIT + 20),
        Ask(random_prompt(3 * LIMIT + 7, seed=2), 60),
        Ask(random_prompt(LIMIT, seed=3), 60, {"kv_sink": 1, "kv_window": 1}),
        Ask([*source, *random_prompt(9, seed=4)], 150, shared),
        Ask([*source, *random_prompt(150, seed=5)], 60, shared),
    ]
    sinks = [(SINK, WINDOW), (SINK, WINDOW), (1, 1), (MAX_SOURCE, WINDOW), (MAX_SOURCE, WINDOW)]
    answers = engine.run(asks, chunk=70)
    for ask, answer, (sink, window) in zip(asks, answers, sinks, strict=True):
        expect_exact(oracle, ask, answer, sink, window, limit=limit)
    assert sum(answer.num_cached for answer in answers) == MAX_SOURCE  # one of the two computed it


def test_both_workers_hold_one_block_row(engine: TwoWorkers) -> None:
    """The scheduler's row: the same blocks on both, from its first step to its last."""
    seen: dict[str, set[tuple[int, ...]]] = {}

    def look(_: int) -> None:
        first, second = engine.on_workers(block_rows)
        assert first == second
        for request_id, row in first.items():
            slot = engine.scheduler.bounded_manager.slot(request_id)
            if not slot:
                continue  # finished; the workers hear of it with the next step
            policy = engine.scheduler.streams[request_id]
            assert row[:HEADER_LEN] == [policy.sink, policy.ring]
            assert row[HEADER_LEN:] == [block.block_id for block in slot]
            seen.setdefault(request_id, set()).add(tuple(row))

    source = random_prompt(MAX_SOURCE, seed=98)
    asks = [
        Ask([*source, 65 + i], 100, {"kv_source_len": MAX_SOURCE, "kv_window": 30 + i})
        for i in range(3)
    ]
    engine.run(asks, chunk=50, on_step=look)
    assert len(seen) == len(asks)
    assert all(len(rows) == 1 for rows in seen.values())
    slots = [row[HEADER_LEN:] for rows in seen.values() for row in rows]
    own = [set(slot[MAX_SOURCE // BLOCK :]) for slot in slots]
    assert len({slot[: MAX_SOURCE // BLOCK] for slot in slots}) == 1
    assert len(set().union(*own)) == sum(map(len, own)), "two streams write one block"


def test_each_worker_holds_its_part(engine: TwoWorkers) -> None:
    """Heads or layers of every block; what is shown is the whole."""
    tiny = TinyLlama()
    shown = engine.scheduler.bounded_kv_figures()
    entry_bytes = tiny.num_layers * 2 * tiny.num_kv_heads * tiny.head_dim * 4
    assert shown["block_bytes"] == entry_bytes * BLOCK
    assert shown["slot_bytes"] == shown["slot_blocks"] * shown["block_bytes"]
    parts = engine.on_workers(poison, [])
    assert {shape[0] for shapes in parts for shape in shapes} == {shown["pool_blocks"] + 1}
    sizes = [sum(math.prod(shape[1:]) * 4 for shape in shapes) for shapes in parts]
    assert min(sizes) > 0 and sum(sizes) == shown["block_bytes"]
