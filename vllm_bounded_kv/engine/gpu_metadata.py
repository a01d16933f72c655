"""Per-step attention metadata on GPUs: a plan that never leaves the device.

vLLM's V2 model runner (0.32.0) keeps block rows, query starts and lengths on the GPU and builds
metadata outside of its CUDA graphs, which then replay on the addresses they captured. So what the
kernels read lies in buffers that stay, as large as the largest batch.

Not run on a GPU yet: see `docs/design.md`, "GPUs". The tests run it on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from vllm_bounded_kv.attention.paged import COLUMNS, NO_SLOT, Turns
from vllm_bounded_kv.attention.paged_plan import plan_paged
from vllm_bounded_kv.engine.header import HEADER_LEN, RING, SINK
from vllm_bounded_kv.engine.settings import policy_of


@dataclass
class BoundedGPUMetadata:
    """What `BoundedGPUAttentionImpl.forward` reads in one step of `B` rows and `N` tokens."""

    table: torch.Tensor
    """`[B, COLUMNS]` int32, see `attention.paged`."""
    block_table: torch.Tensor
    """`[B, max_blocks]` int32, without headers."""
    slots: torch.Tensor
    """`[N]` int64, of tokens stored before attention."""
    late_slots: torch.Tensor
    """`[N]` int64, of tokens stored after it."""
    turns: Turns | None
    """`None` where rotary positions never fall back."""
    num_actual_tokens: int
    """`N`; vLLM reads it as well."""


class BoundedGPUMetadataBuilder(AttentionMetadataBuilder[BoundedGPUMetadata]):
    """Builds `BoundedGPUMetadata` from block rows that carry a header."""

    # One kernel serves all rows, and its grid depends on the sizes of the batch alone.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        policy = policy_of(vllm_config)
        assert policy is not None
        self.block_size: int = kv_cache_spec.block_size
        self.position_limit = policy.position_limit
        self._max_capacity = policy.largest.capacity  # below the position limit
        self.turns: Turns | None = None
        """Set by the worker, where positions fall back: only it knows the model."""
        scheduler = vllm_config.scheduler_config
        max_tokens = scheduler.max_num_batched_tokens
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        """What the model is given for rotary positions, where they fall back."""
        self._table = torch.zeros(scheduler.max_num_seqs, COLUMNS, dtype=torch.int32, device=device)
        self._slots = torch.full((2, max_tokens), NO_SLOT, dtype=torch.int64, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> BoundedGPUMetadata:
        """Plan the step; waits for nothing."""
        common = common_attn_metadata
        num_rows, num_tokens = common.num_reqs, common.num_actual_tokens
        rows = common.block_table_tensor[:num_rows]
        blocks = rows[:, HEADER_LEN:]
        sink, ring = rows[:, SINK], rows[:, RING]
        # vLLM's profiling of step costs fills rows with block ids, headers too: what no stream can
        # be is none. Others are played as streams, over blocks that nobody holds by then.
        is_stream = sink.long() + ring <= self._max_capacity
        plan = plan_paged(
            sink=sink,
            ring=torch.where(is_stream, ring, 0),
            block_table=blocks,
            query_start=common.query_start_loc[: num_rows + 1],
            stream_lens=common.seq_lens[:num_rows],
            num_tokens=num_tokens,
            block_size=self.block_size,
            position_limit=self.position_limit,
        )
        table, slots = self._table[:num_rows], self._slots[:, :num_tokens]
        table.copy_(plan.table)
        slots[0].copy_(plan.slots)
        slots[1].copy_(plan.late_slots)
        self.positions[:num_tokens].copy_(plan.positions)
        return BoundedGPUMetadata(
            table=table,
            block_table=blocks,
            slots=slots[0],
            late_slots=slots[1],
            turns=self.turns,
            num_actual_tokens=num_tokens,
        )
