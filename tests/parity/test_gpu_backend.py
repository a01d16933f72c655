"""The GPU backend over whole streams: builder and layer as vLLM's V2 runner would call them.

On a CPU the kernels are interpreted and the runner's tensors are ours, so this shows what they
compute, not that vLLM calls them so.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.interpreted_triton import DEVICE
from support.paged_batch import Batch, Stream
from vllm_bounded_kv.attention.paged import Turns
from vllm_bounded_kv.engine.header import HEADER_LEN
from vllm_bounded_kv.engine.policy import EnginePolicy

pytest.importorskip("vllm")  # a machine with a GPU may have torch and Triton alone

BLOCK, KV_HEADS, GROUP, HEAD_DIM, NUM_BLOCKS = 16, 2, 2, 32, 40
SCALE = HEAD_DIM**-0.5
SHAPES = [(0, 7), (5, 20), (16, 9), (33, 40)]
LIMIT = 80
MAX_ROWS, MAX_TOKENS = 6, 64
TOLERANCE = 2e-5


class Runner:
    """Persistent inputs at fixed addresses, one layer's cache, and streams that only grow."""

    def __init__(self, limit: int | None, is_head_first: bool, seed: int) -> None:
        from vllm_bounded_kv.engine.gpu_backend import BoundedGPUAttentionBackend as Backend

        self.chance, self.limit = random.Random(seed), limit
        self.generator = torch.Generator().manual_seed(seed)
        positions = {"positions": "absolute"} if limit is None else {"position_limit": limit}
        policy = EnginePolicy(sink=5, window=40, max_source_len=33, **positions)  # type: ignore[arg-type]
        if limit is None:
            policy = policy.resolve(10**6, 10**6, None)
        scheduler = SimpleNamespace(max_num_seqs=MAX_ROWS, max_num_batched_tokens=MAX_TOKENS)
        config: Any = SimpleNamespace(
            additional_config={"kv_plugin": "bounded", "bounded_kv": policy.to_mapping()},
            scheduler_config=scheduler,
        )
        spec = SimpleNamespace(block_size=BLOCK)
        self.builder = Backend.get_builder_cls()(spec, ["layer"], config, torch.device(DEVICE))
        self.layer = Backend.get_impl_cls()(
            KV_HEADS * GROUP, HEAD_DIM, SCALE, KV_HEADS, None, None, "auto", None, "decoder", None
        )
        shape = (NUM_BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM)
        if is_head_first:
            self.cache = torch.full(shape, torch.nan, device=DEVICE)
        else:
            n, h, b, d = shape
            self.cache = torch.full((n, b, h, d), torch.nan, device=DEVICE).transpose(1, 2)
        width = HEADER_LEN + max(-(-sum(s) // BLOCK) for s in SHAPES) + 1
        ints = {"dtype": torch.int32, "device": DEVICE}
        self.rows = torch.zeros(MAX_ROWS, width, **ints)  # type: ignore[call-overload]
        self.query_start = torch.zeros(MAX_ROWS + 1, **ints)  # type: ignore[call-overload]
        self.seq_lens = torch.zeros(MAX_ROWS, **ints)  # type: ignore[call-overload]
        deck = list(range(1, NUM_BLOCKS))
        self.chance.shuffle(deck)
        nothing = torch.empty(0, KV_HEADS, HEAD_DIM)
        self.streams = [
            Stream(s, r, 0, 0, [deck.pop() for _ in range(-(-(s + r) // BLOCK))], nothing, nothing)
            for s, r in SHAPES
        ]
        frequencies = self.batch([], 0).frequencies.numpy()
        self.builder.turns = Turns.of(frequencies, True, torch.device(DEVICE)) if limit else None

    def batch(self, streams: list[Stream], num_padded: int) -> Batch:
        num_tokens = sum(s.length for s in streams) + num_padded
        query = torch.randn(num_tokens, KV_HEADS * GROUP, HEAD_DIM, generator=self.generator)
        shape = (BLOCK, NUM_BLOCKS, num_padded, KV_HEADS, GROUP, HEAD_DIM)
        return Batch(streams, *shape, torch.float32, True, self.limit, HEAD_DIM, True, query)

    def step(self, lengths: list[int], num_padded: int) -> float:
        """Largest error of a step that adds so many tokens to each stream; 0: it is not in it."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        taking = []
        for stream, length in zip(self.streams, lengths, strict=True):
            stream.before, stream.length = stream.after, length
            shape = (2, length, KV_HEADS, HEAD_DIM)
            keys, values = torch.randn(shape, generator=self.generator)
            stream.keys = torch.cat([stream.keys, keys])
            stream.values = torch.cat([stream.values, values])
            if length:
                taking.append(stream)
        batch = self.batch(taking, num_padded)
        num_rows = MAX_ROWS if num_padded else len(taking)
        self.rows[:, :HEADER_LEN] = 0  # further columns are as the last step left them
        for row, stream in enumerate(taking):
            values_ = [stream.sink, stream.ring, *stream.blocks]
            self.rows[row, : len(values_)] = torch.tensor(values_, dtype=torch.int32)
        starts = [0]
        for stream in taking:
            starts.append(starts[-1] + stream.length)
        starts += [starts[-1]] * (MAX_ROWS + 1 - len(starts))
        self.query_start.copy_(torch.tensor(starts))
        self.seq_lens.zero_()
        self.seq_lens[: len(taking)] = torch.tensor([s.after for s in taking])
        common = CommonAttentionMetadata(
            query_start_loc=self.query_start[: num_rows + 1],
            query_start_loc_cpu=torch.tensor(starts)[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            num_reqs=num_rows,
            num_actual_tokens=batch.num_tokens,
            max_query_len=max(lengths),
            max_seq_len=10**6,
            block_table_tensor=self.rows[:num_rows],
            slot_mapping=torch.zeros(0),
        )
        self.metadata = self.builder.build(0, common)
        out = torch.zeros_like(batch.query).to(DEVICE)
        own = (batch.own("keys").to(DEVICE), batch.own("values").to(DEVICE))
        self.layer.forward(None, batch.query.to(DEVICE), *own, self.cache, self.metadata, out)
        real = batch.num_tokens - num_padded
        self.given = self.builder.positions[: batch.num_tokens].tolist()
        self.expected = [
            s.rotary(p, self.limit) for s in taking for p in range(s.before, s.after)
        ] + [0] * num_padded
        return float((out[:real].cpu().double() - batch.attention(SCALE)).abs().max())


@pytest.mark.parametrize(("limit", "is_head_first"), [(None, True), (LIMIT, False)])
def test_streams_equal_the_oracle_through_wraps_and_boundaries(
    limit: int | None, is_head_first: bool
) -> None:
    runner = Runner(limit, is_head_first, seed=0)
    for number in range(70):
        lengths = [
            runner.chance.choice([0, 1, 1, 1, 1, runner.chance.randint(1, 14)]) for _ in SHAPES
        ]
        if number in (0, 30):
            lengths = [12, 14, 3, 30]  # prompts, and one that wraps a small ring
        if not any(lengths):
            continue
        error = runner.step(lengths, runner.chance.choice([0, 0, 3]))
        assert error < TOLERANCE, f"step {number}: {error}"
        assert runner.given == runner.expected
    assert all(s.after > s.sink + 3 * s.ring // 2 for s in runner.streams)
    if limit:
        assert min(s.after for s in runner.streams) > limit + 5


def test_what_a_graph_has_captured_stays_in_place() -> None:
    runner = Runner(LIMIT, True, seed=1)

    def addresses() -> list[int]:
        meta = runner.metadata
        tensors = (meta.table, meta.block_table, meta.slots, meta.late_slots)
        return [t.data_ptr() for t in (*tensors, runner.builder.positions)]

    runner.step([3, 4, 5, 6], 3)
    first = addresses()
    runner.step([1, 0, 20, 1], 3)
    assert addresses() == first
    # A smaller batch in the same graph: rows and tokens beyond it do nothing.
    assert runner.metadata.table.shape[0] == MAX_ROWS
    assert not runner.metadata.table[3:, 1].any()
    assert runner.metadata.slots[-3:].tolist() == [-1] * 3


def test_rows_that_are_no_streams_do_nothing() -> None:
    """vLLM's profiling of step costs fills block rows, their headers too, with block ids."""
    runner = Runner(LIMIT, True, seed=2)
    runner.step([3, 4, 5, 6], 0)
    before = runner.cache.clone()
    runner.rows.fill_(NUM_BLOCKS - 1)
    runner.rows[:, :HEADER_LEN] = 40  # as large together as a slot, not as any stream
    from vllm.v1.attention.backend import CommonAttentionMetadata

    common = CommonAttentionMetadata(
        query_start_loc=torch.arange(3, dtype=torch.int32, device=DEVICE),
        query_start_loc_cpu=torch.arange(3, dtype=torch.int32),
        seq_lens=torch.full((2,), 500, dtype=torch.int32, device=DEVICE),
        num_reqs=2,
        num_actual_tokens=2,
        max_query_len=1,
        max_seq_len=500,
        block_table_tensor=runner.rows[:2],
        slot_mapping=torch.zeros(0),
    )
    meta = runner.builder.build(0, common)
    x = torch.randn(2, KV_HEADS, HEAD_DIM, device=DEVICE)
    query = torch.randn(2, KV_HEADS * GROUP, HEAD_DIM, device=DEVICE)
    runner.layer.forward(None, query, x, x, runner.cache, meta, torch.zeros_like(query))
    assert torch.equal(runner.cache.nan_to_num(9.0), before.nan_to_num(9.0))


def test_profiling_gives_zeros() -> None:
    runner = Runner(None, True, seed=3)
    query = torch.randn(2, KV_HEADS * GROUP, HEAD_DIM, device=DEVICE)
    out = torch.full_like(query, torch.nan)
    assert not runner.layer.forward(None, query, query, query, runner.cache, None, out).any()
