"""vLLM's schedulers over bounded slots, without a worker: who holds which blocks, and when.

`Core` plays the engine core with a model that makes its tokens up. It schedules, answers and
updates; with the asynchronous scheduler it schedules a step before the last one is answered, as
`EngineCore.step_with_batch_queue` does. What must hold of every stream is checked at every turn.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.tiny_llama import random_prompt
from vllm_bounded_kv.engine import scheduler as scheduler_module
from vllm_bounded_kv.engine.blocks import BoundedBlockManager
from vllm_bounded_kv.engine.header import HEADER_LEN
from vllm_bounded_kv.engine.policy import PolicyError
from vllm_bounded_kv.engine.scheduler import BoundedAsyncScheduler, BoundedScheduler
from vllm_bounded_kv.engine.settings import policy_of
from vllm_bounded_kv.engine.spec import bounded_spec

BLOCK, SINK, WINDOW, SOURCE_LEN = 16, 5, 70, 48
SMALL, LARGE = 5, 8
"""Blocks of a stream that says nothing (75 entries), and of one over a source (118)."""
SHARED = SOURCE_LEN // BLOCK
OVER_SOURCE = {"kv_source_len": SOURCE_LEN}
SOURCE = random_prompt(SOURCE_LEN, seed=99)
MANY = 2_000


class Core:
    """A scheduler over `num_blocks` blocks, and the block rows that a worker would hold."""

    def __init__(self, scheduler_cls: type[BoundedScheduler], config: Any, num_blocks: int) -> None:
        policy = policy_of(config)
        assert policy is not None
        total = config.cache_config.num_gpu_blocks = num_blocks + 1  # one is vLLM's null block
        full = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        self.scheduler: Any = scheduler_cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=total,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], bounded_spec(full, policy))],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        init_none_hash(sha256)
        caches = config.cache_config.enable_prefix_caching
        self.hasher = get_request_block_hasher(BLOCK, sha256) if caches else None
        self.depth = 2 if issubclass(scheduler_cls, BoundedAsyncScheduler) else 1
        self.pool = self.scheduler.bounded_manager.block_pool
        self.in_flight: deque[tuple[SchedulerOutput, set[str]]] = deque()
        self.tokens = itertools.count()
        self.policies: dict[str, tuple[int, int]] = {}
        self.rows: dict[str, list[int]] = {}
        self.num_hit: dict[str, int] = {}
        self.ring_wraps = 0

    def add(self, name: str, prompt: list[int], max_tokens: int = 60, **args: int) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=args or None)
        request = Request(name, prompt, params, None, block_hasher=self.hasher)
        sink = args.get("kv_sink", max(SINK, args.get("kv_source_len", 0)))
        self.policies[name] = sink, args.get("kv_window", WINDOW)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> None:
        output = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = list(new.block_ids[0])
            self.num_hit[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, position in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.rows[name] = list(blocks[0])
                self.num_hit[name] = position
            else:
                assert blocks is None, f"{name} was given blocks in mid-stream"
        requests = self.scheduler.requests
        ids = output.num_scheduled_tokens
        samples = {name for name in ids if not requests[name].is_prefill_chunk}
        self.in_flight.append((output, samples))
        self.check()

    def answer(self) -> None:
        output, samples = self.in_flight.popleft()
        ids = list(output.num_scheduled_tokens)
        tokens = [[next(self.tokens) % 250] if name in samples else [] for name in ids]
        indices = {name: index for index, name in enumerate(ids)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(ids, indices, tokens))
        self.check()

    def step(self) -> None:
        if self.scheduler.has_requests():
            self.schedule()
            if len(self.in_flight) < self.depth:
                return
        if self.in_flight:
            self.answer()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self) -> None:
        for _ in range(10 * MANY):
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            self.step()
        raise AssertionError("the streams do not come to an end")

    def abort(self, *names: str) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        self.check()

    def preempt(self, name: str) -> None:
        request = self.scheduler.requests[name]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic())
        self.check()

    def slot(self, name: str) -> list[Any]:
        return self.scheduler.bounded_manager.slot(name)

    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    @property
    def num_held(self) -> int:
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    def check(self) -> None:
        self.scheduler.check_integrity()
        wraps = self.scheduler.bounded_kv_figures()["ring_wraps"]
        assert wraps >= self.ring_wraps, "a counter went backwards"
        self.ring_wraps = wraps
        for name, request in self.scheduler.requests.items():
            slot, (sink, ring) = self.slot(name), self.policies[name]
            immutable = sink // BLOCK
            assert len(request.block_hashes) <= immutable, f"{name} hashes more than its sink"
            if request.status is not RequestStatus.RUNNING:
                assert not slot, f"{name} holds {len(slot)} blocks while it waits"
                continue
            assert len(slot) == -(-(sink + ring) // BLOCK)
            assert self.rows[name] == [sink, ring, *(block.block_id for block in slot)]
            for block, block_hash in zip(slot, request.block_hashes, strict=False):
                assert block.block_hash is None or get_block_hash(block.block_hash) == block_hash
            for block in slot[immutable:]:
                assert block.block_hash is None, f"{name}: a ring block is hashed"
                assert block.ref_cnt == 1, f"{name}: a ring block is shared"


MakeCore = Callable[..., Core]


@pytest.fixture(params=[BoundedScheduler, BoundedAsyncScheduler], ids=["plain", "async"])
def make_core(
    request: pytest.FixtureRequest, plugin: None, engine_args: Callable[..., Any]
) -> Iterator[MakeCore]:
    """Makes cores; afterwards every block of theirs must be back."""
    cores = []

    def make(
        num_blocks: int = 60,
        max_slots: int | None = None,
        max_pinned_blocks: int | None = None,
        **kwargs: Any,
    ) -> Core:
        bounded = {
            "sink": SINK,
            "window": WINDOW,
            "max_source_len": SOURCE_LEN,
            "max_slots": max_slots,
            "max_pinned_blocks": max_pinned_blocks,
        }
        args = engine_args(bounded, block_size=BLOCK, **kwargs)
        config = args.create_engine_config()
        config.scheduler_config.async_scheduling = request.param is BoundedAsyncScheduler
        cores.append(Core(request.param, config, num_blocks))
        return cores[-1]

    yield make
    for core in cores:
        core.abort(*core.scheduler.requests)
        assert core.num_held == 0, "blocks were not given back"
        core.run()
        assert all(block.ref_cnt == 0 for block in core.pool.blocks if not block.is_null)
        assert not core.scheduler.streams and not core.scheduler.bounded_manager.req_to_blocks


def over_source(tail_len: int) -> list[int]:
    return [*SOURCE, *random_prompt(tail_len, seed=tail_len)]


# --- one stream ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "num_blocks", "num_hashed"),
    [
        ({}, SMALL, 0),
        (OVER_SOURCE, LARGE, SHARED),
        ({"kv_sink": 33, "kv_window": 31}, 4, 2),
        ({"kv_sink": 0, "kv_window": 1}, 1, 0),
    ],
)
def test_an_endless_stream_keeps_the_blocks_it_began_with(
    make_core: MakeCore, args: dict[str, int], num_blocks: int, num_hashed: int
) -> None:
    core = make_core()
    request = core.add("a", over_source(9), MANY + 9, **args)
    core.step()
    first = core.rows["a"]
    for _ in range(MANY):
        core.step()
        assert core.num_held == num_blocks
    assert [block.block_id for block in core.slot("a")] == first[HEADER_LEN:]
    assert request.num_computed_tokens >= MANY
    assert len(request.block_hashes) == num_hashed
    assert sum(block.block_hash is not None for block in core.pool.blocks) == num_hashed
    core.run()
    assert request.num_output_tokens == MANY + 9


def test_nothing_is_hashed_or_shared_without_prefix_caching(make_core: MakeCore) -> None:
    core = make_core(enable_prefix_caching=False)
    for name in "ab":
        core.add(name, over_source(5), **OVER_SOURCE)
    core.steps(20)
    assert core.num_held == 2 * LARGE
    assert not any(block.block_hash for block in core.pool.blocks)
    core.run()


# --- admission -------------------------------------------------------------------------------


def test_a_stream_waits_for_a_whole_slot(make_core: MakeCore) -> None:
    """All but one of its blocks are free, and it takes none of them."""
    core = make_core(num_blocks=LARGE + SMALL - 1)
    first = core.add("a", over_source(5), **OVER_SOURCE)
    second = core.add("b", random_prompt(3), 5)
    while not first.is_finished():
        assert core.num_held in (0, LARGE)
        assert second.status is RequestStatus.WAITING
        core.step()
    core.step()
    assert core.running() == ["b"]
    assert core.num_held == SMALL
    core.run()
    assert second.num_output_tokens == 5


def test_max_slots_is_the_most_that_run(make_core: MakeCore) -> None:
    core = make_core(max_slots=2)
    streams = [core.add(str(i), random_prompt(20, seed=i), 30 + 9 * i) for i in range(5)]
    seen = []
    while not all(stream.is_finished() for stream in streams):
        core.step()
        seen.append(len(core.running()))
    assert max(seen) == 2
    assert core.scheduler.num_slots == 2


def test_nothing_is_preempted_in_a_scarce_pool(make_core: MakeCore) -> None:
    core = make_core(num_blocks=3 * SMALL + 2)
    streams = [core.add(str(i), random_prompt(30, seed=i), 300) for i in range(7)]
    core.steps(5)
    assert core.running() == ["0", "1", "2"]
    core.run()
    assert [stream.num_preemptions for stream in streams] == [0] * 7
    assert [stream.num_output_tokens for stream in streams] == [300] * 7


@pytest.mark.parametrize(("watermark", "num_running"), [(0.0, 2), (0.15, 2), (0.2, 1), (0.9, 1)])
def test_the_watermark_keeps_blocks_free(
    make_core: MakeCore, watermark: float, num_running: int
) -> None:
    """Of 20 blocks, the null block counted, 3 are free beside two streams; one always gets in."""
    core = make_core(num_blocks=19, watermark=watermark)
    streams = [core.add(str(i), random_prompt(60, seed=i), 200, kv_sink=48) for i in range(3)]
    core.steps(5)
    assert len(core.running()) == num_running
    core.run()
    assert [stream.num_output_tokens for stream in streams] == [200] * 3
    assert not any(stream.num_preemptions for stream in streams)


# --- leaving and coming back -----------------------------------------------------------------


@pytest.mark.parametrize("tail_len", [5, 400])
def test_an_abort_with_steps_in_flight_gives_all_blocks_back(
    make_core: MakeCore, tail_len: int
) -> None:
    core = make_core(num_blocks=LARGE + SMALL - 1, max_num_batched_tokens=64)
    core.add("a", over_source(tail_len), 200, **OVER_SOURCE)
    core.add("waiting", random_prompt(9), 200)
    core.steps(3)
    core.schedule()
    assert len(core.in_flight) == core.depth
    assert core.num_held == LARGE
    core.abort("a", "waiting")
    assert core.num_held == 0
    heir = core.add("b", over_source(7), 200, **OVER_SOURCE)
    while core.in_flight:
        core.answer()
    core.run()
    assert heir.num_output_tokens == 200


@pytest.mark.parametrize("how", ["reset", "forced"])
def test_a_preempted_stream_comes_back_with_a_whole_slot(make_core: MakeCore, how: str) -> None:
    core = make_core(num_blocks=2 * LARGE)
    streams = [core.add(name, over_source(5), 300, **OVER_SOURCE) for name in "ab"]
    core.steps(150)
    assert core.num_hit == {"a": 0, "b": SOURCE_LEN}
    if how == "reset":
        assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        core.preempt("b")
        core.preempt("a")
    assert core.num_held == 0
    core.steps(3)
    assert core.running() == ["a", "b"]
    assert core.num_hit == {"a": 0 if how == "reset" else SOURCE_LEN, "b": SOURCE_LEN}
    assert core.num_held == 2 * LARGE - SHARED
    core.run()
    assert [stream.num_output_tokens for stream in streams] == [300, 300]
    assert [stream.num_preemptions for stream in streams] == [1, 1]


def test_wraps_before_a_preemption_still_count(make_core: MakeCore) -> None:
    """The stream is recomputed, so its ring starts over as often again."""
    core = make_core()
    core.add("a", random_prompt(20), 400)
    core.steps(300)
    before = core.ring_wraps
    assert before >= 3
    core.preempt("a")
    assert core.ring_wraps == before
    core.run()
    entries = 20 + 400 - 1
    assert core.ring_wraps == before + (entries - 1 - SINK) // WINDOW


# --- shared sources --------------------------------------------------------------------------


def references(core: Core, name: str) -> list[int]:
    return [block.ref_cnt for block in core.slot(name)]


@pytest.mark.parametrize("steps_between", [0, 1, 40])
def test_streams_over_one_source_share_its_blocks(make_core: MakeCore, steps_between: int) -> None:
    core = make_core()
    core.add("a", over_source(5), 50, **OVER_SOURCE)
    core.steps(steps_between)
    core.add("b", over_source(300), 100, **OVER_SOURCE)
    core.add("c", over_source(9), 200, **OVER_SOURCE)
    core.steps(3)
    assert core.num_hit == {"a": 0, "b": SOURCE_LEN, "c": SOURCE_LEN}
    assert core.slot("a")[:SHARED] == core.slot("b")[:SHARED] == core.slot("c")[:SHARED]
    own = LARGE - SHARED
    assert core.num_held == SHARED + 3 * own
    for running in (3, 2, 1):
        assert references(core, "c") == [running] * SHARED + [1] * own
        while len(core.running()) == running:
            core.step()
    assert core.num_held == 0
    core.add("late", over_source(2), **OVER_SOURCE)
    core.step()
    assert core.num_hit["late"] == SOURCE_LEN


def test_a_hit_that_nobody_holds_costs_its_blocks(make_core: MakeCore) -> None:
    """One block short of a slot: the three hits must not be taken for free ones twice."""
    core = make_core(num_blocks=LARGE + SMALL - 1)
    core.add("a", over_source(5), 3, **OVER_SOURCE)
    core.run()
    small = core.add("small", random_prompt(9), 30)
    late = core.add("late", over_source(6), **OVER_SOURCE)
    while not small.is_finished():
        assert late.status is RequestStatus.WAITING
        core.step()
    core.step()
    assert core.num_hit["late"] == SOURCE_LEN


def test_a_smaller_sink_shares_only_its_own_blocks(make_core: MakeCore) -> None:
    core = make_core()
    core.add("a", over_source(5), **OVER_SOURCE)
    core.add("b", over_source(5), kv_sink=SOURCE_LEN - 1)
    core.add("c", over_source(5))
    core.step()
    assert core.num_hit == {"a": 0, "b": SOURCE_LEN - BLOCK, "c": 0}
    assert references(core, "a") == [2, 2] + [1] * (LARGE - 2)


def test_a_sink_that_generation_fills_is_shared_too(make_core: MakeCore) -> None:
    core = make_core()
    first = core.add("a", random_prompt(10), 200, kv_sink=SOURCE_LEN)
    core.steps(15)
    assert len(first.block_hashes) == 1
    core.steps(100)
    core.add("b", list(first.all_token_ids[:60]), kv_sink=SOURCE_LEN)
    core.steps(3)
    assert core.num_hit["b"] == SOURCE_LEN
    assert references(core, "b") == references(core, "a") == [2] * SHARED + [1] * (LARGE - SHARED)


# --- anything at any time --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_streams_that_come_and_go_at_random(make_core: MakeCore, seed: int) -> None:
    chance = random.Random(seed)
    core = make_core(3 * LARGE, max_num_batched_tokens=chance.choice([16, 64, 512]))
    added = []
    for number in range(600):
        if chance.random() < 0.1 and len(core.scheduler.requests) < 8:
            args = chance.choice([{}, OVER_SOURCE, {"kv_sink": chance.randint(0, SOURCE_LEN)}])
            args = {**args, "kv_window": chance.randint(1, WINDOW)}
            prompt = over_source(chance.choice([1, 9, 200]))
            added.append(core.add(str(number), prompt, chance.randint(1, 150), **args))
        fate = chance.random()
        if core.running() and fate < 0.06:
            name = chance.choice(core.running())
            core.abort(name) if fate < 0.03 else core.preempt(name)
        elif fate > 0.99:
            core.scheduler.reset_prefix_cache(reset_running_requests=True)
        core.step()
    core.run()
    whole = [r for r in added if r.status is not RequestStatus.FINISHED_ABORTED]
    assert whole
    assert all(r.num_output_tokens == r.max_tokens for r in whole)


# --- pinned sources --------------------------------------------------------------------------


def pin(core: Core, action: str, **values: Any) -> dict[str, Any]:
    answer: dict[str, Any] = core.scheduler.bounded_kv_sources(action, values, core.hasher)
    core.check()
    return answer


def test_slots_are_counted_beside_the_pins(make_core: MakeCore) -> None:
    slots, pins = 3, 5
    for given, num_blocks, expected in (
        (pins, slots * LARGE + pins, pins),
        (None, slots * LARGE + 2, 2),
        (0, slots * LARGE, 0),
    ):
        core = make_core(num_blocks, max_slots=slots, max_pinned_blocks=given)
        shown = core.scheduler.bounded_kv_figures()
        assert (shown["slots_total"], shown["max_pinned_blocks"]) == (slots, expected)
    core = make_core(slots * LARGE + pins, max_pinned_blocks=pins + 1)
    assert core.scheduler.bounded_kv_figures()["slots_total"] == slots - 1
    with pytest.raises(
        PolicyError, match=r"pinned-blocks=6: needs 24 blocks .* beside 6 for pinned .* pool has 29"
    ):
        make_core(slots * LARGE + pins, max_slots=slots, max_pinned_blocks=pins + 1)


def test_a_pin_is_no_stream_that_shares(make_core: MakeCore) -> None:
    core = make_core(max_pinned_blocks=SHARED)
    core.add("a", over_source(5), **OVER_SOURCE)
    core.steps(3)
    pin(core, "add", name="voice", token_ids=SOURCE)
    for number, shared in ((1, 0), (2, SHARED)):
        shown = core.scheduler.bounded_kv_figures()
        assert (shown["slots_used"], shown["pinned_blocks"]) == (number, SHARED)
        assert (shown["source_blocks_held"], shown["source_blocks_shared"]) == (SHARED, shared)
        core.add(f"b{number}", over_source(6), **OVER_SOURCE)
        core.steps(3)
    pin(core, "remove", name="voice")
    core.run()


@pytest.mark.parametrize("seed", range(4))
def test_sources_that_come_and_go_at_random(make_core: MakeCore, seed: int) -> None:
    """Among streams that do, and resets: all sums add up, and what is pinned is always a hit."""
    choose = random.Random(seed)
    core = make_core(num_blocks=4 * LARGE + 9, max_slots=4, max_pinned_blocks=9)
    names = itertools.count()
    contents = [
        random_prompt(length, seed=i % 3) for i, length in enumerate((48, 33, 16, 47, 48, 20))
    ]
    for _ in range(300):
        what = choose.choice(["add", "remove", "stream", "abort", "reset", "step", "step", "step"])
        source = choose.randrange(len(contents))
        if what == "add":
            ttl_s = choose.choice([None, 1e9, 1e-9])
            pin(core, "add", name=f"s{source}", token_ids=contents[source], ttl_s=ttl_s)
        elif what == "remove":
            pin(core, "remove", name=f"s{source}")
        elif what == "stream":
            length = len(contents[source])
            prompt = [*contents[source], *random_prompt(choose.randrange(1, 90), seed=length)]
            core.add(f"r{next(names)}", prompt, choose.randrange(1, 40), kv_source_len=length)
        elif what == "abort" and core.scheduler.requests:
            core.abort(choose.choice(sorted(core.scheduler.requests)))
        elif what == "reset":
            core.scheduler.reset_prefix_cache(reset_running_requests=choose.random() < 0.3)
            core.check()
        core.step()
        sources = core.scheduler.sources
        assert sources.num_blocks <= sources.max_blocks
        for block_hash, held in sources._pins.items():
            cached = core.pool.get_cached_block(block_hash, [0])
            assert held.block is None or cached, "a pinned block is no longer found"
    core.run()
    for source in pin(core, "list")["data"]:
        pin(core, "remove", name=source["name"])


# --- controls: these tests can fail ----------------------------------------------------------


def test_control_a_stream_that_grows_is_noticed(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    core.add("a", random_prompt(50), 200)
    core.steps(4)
    monkeypatch.setattr(
        BoundedBlockManager, "allocate_new_blocks", SingleTypeKVCacheManager.allocate_new_blocks
    )
    with pytest.raises(AssertionError, match="a was given blocks in mid-stream"):
        core.run()


def test_control_hashing_on_and_on_is_noticed(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "_cap_hashing", lambda request, num_blocks: None)
    core = make_core()
    core.add("a", random_prompt(BLOCK - 9), 200)
    with pytest.raises(AssertionError, match="hashes more than its sink"):
        core.run()


# --- drafts ----------------------------------------------------------------------------------


def next_piece(name: str, piece: list[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, piece, params, None, resumable=True)


@pytest.mark.parametrize("make_core", [BoundedScheduler], indirect=True)
@pytest.mark.parametrize("num_said", [1, 2, 3, 4, 5])
def test_a_turn_that_stops_within_an_accepted_draft(make_core: MakeCore, num_said: int) -> None:
    """What was accepted behind its last token was never said: the next piece takes its place."""
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    core = make_core(speculative_config=ngram)
    scheduler, prompt, draft = core.scheduler, random_prompt(20), [7, 8, 9, 10]
    session = next_piece("s", list(prompt), 1 + num_said)
    core.policies["s"] = SINK, WINDOW
    scheduler.add_request(session)
    core.step()
    (first,) = session.output_token_ids
    scheduler.update_draft_token_ids(DraftTokenIds(["s"], [draft]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"s": 1 + len(draft)}
    accepted = ModelRunnerOutput(["s"], {"s": 0}, [[*draft, 11]])
    answers = scheduler.update_from_output(output, accepted)
    said = [*draft, 11][:num_said]
    assert [answer.new_token_ids for answer in answers[0].outputs] == [said]
    assert session.num_computed_tokens == len(prompt) + num_said
    scheduler.add_request(next_piece("s", [50, 51], 1))
    # Its last token is the next piece's to replace, as at every turn's end.
    assert list(session.all_token_ids) == [*prompt, first, *said[:-1], 50, 51]
    assert scheduler.schedule().num_scheduled_tokens == {"s": 2}
