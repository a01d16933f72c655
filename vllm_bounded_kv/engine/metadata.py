"""Per-step attention metadata: vLLM's own, rewritten so that a bounded slot looks like a
short sequence, and beside it what the step needs that the stock kernel cannot do."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

from vllm_bounded_kv.engine import ranged
from vllm_bounded_kv.engine.header import HEADER_LEN
from vllm_bounded_kv.engine.plan import EnginePlan, plan_step
from vllm_bounded_kv.engine.rebase import Turn
from vllm_bounded_kv.engine.rotary import Rotary, Rotation
from vllm_bounded_kv.engine.settings import policy_of


@dataclass
class TurnKeys:
    """Cached keys to turn in place."""

    slots: torch.Tensor
    """`[n]` int64 cache slots."""
    rotation: Rotation


@dataclass
class BoundedCPUMetadata:
    """What `BoundedCPUAttentionImpl.forward` does in one step; its order is in `backend`."""

    new_partial_blocks: torch.Tensor | None
    """Blocks to clear."""
    slot_mapping: torch.Tensor
    """`[N]` int64, -1 for tokens not written before attention."""
    stock: CPUAttentionMetadata | None
    """For vLLM's kernel; `None` when no row is left to it."""
    stock_tokens: torch.Tensor | None
    """Tokens of those rows; `None` when they are the whole batch."""
    ranged: list[ranged.RangedAttention]
    late_tokens: torch.Tensor | None
    late_slots: torch.Tensor | None

    turn_first: TurnKeys | None = None
    turn_last: TurnKeys | None = None

    # What vLLM reads of any attention metadata.
    num_actual_tokens: int = 0


class BoundedCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds `BoundedCPUMetadata` from block rows that carry a header."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.isa == "amx":  # packs keys in pairs; the ranged path reads the plain layout
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)
        policy = policy_of(vllm_config)
        assert policy is not None
        self.position_limit = policy.position_limit
        self.spare = policy.spare
        self.rotary: Rotary | None = None
        """Set by the worker, where positions fall back: only it knows the model."""

    def build(  # type: ignore[override]
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> BoundedCPUMetadata:
        """Plan the step and hand vLLM's builder the rows that its kernel serves."""
        common = common_attn_metadata
        plan = plan_step(
            common.block_table_tensor.numpy(),
            common.query_start_loc.numpy(),
            common.seq_lens.numpy(),
            common.num_actual_tokens,
            self.block_size,
            self.position_limit,
            self.spare,
        )
        rebase = plan.rebase
        if rebase is not None:
            # A view of what the runner is about to give to the model.
            assert common.positions is not None
            common.positions[: len(rebase.positions)] = torch.from_numpy(rebase.positions)
        rewritten = copy.copy(common)
        rewritten.seq_lens = torch.from_numpy(plan.seq_lens)
        rewritten.block_table_tensor = common.block_table_tensor[:, HEADER_LEN:]
        rewritten.slot_mapping = torch.from_numpy(plan.slot_mapping)
        stock, stock_tokens = self._stock(plan, rewritten)
        group = self.num_heads // self.num_kv_heads
        dtype = self.vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        has_late = len(plan.late_tokens) > 0
        return BoundedCPUMetadata(
            new_partial_blocks=(
                torch.from_numpy(plan.new_partial_blocks) if len(plan.new_partial_blocks) else None
            ),
            slot_mapping=rewritten.slot_mapping,
            stock=stock,
            stock_tokens=stock_tokens,
            ranged=[ranged.prepare(row, group, dtype, self.rotary) for row in plan.ranged],
            late_tokens=torch.from_numpy(plan.late_tokens) if has_late else None,
            late_slots=torch.from_numpy(plan.late_slots) if has_late else None,
            turn_first=self._turn(rebase.first) if rebase is not None else None,
            turn_last=self._turn(rebase.last) if rebase is not None else None,
            num_actual_tokens=common.num_actual_tokens,
        )

    def _turn(self, turn: Turn | None) -> TurnKeys | None:
        if turn is None:
            return None
        assert self.rotary is not None
        return TurnKeys(torch.from_numpy(turn.slots), self.rotary.rotation(turn.by))

    def _stock(
        self, plan: EnginePlan, common: CommonAttentionMetadata
    ) -> tuple[CPUAttentionMetadata | None, torch.Tensor | None]:
        """vLLM's metadata for the rows its kernel serves, and their tokens."""
        if not plan.ranged:
            return super().build(0, common), None
        rows = np.flatnonzero(plan.stock_rows)
        query_start = common.query_start_loc.numpy()
        query_lens = np.diff(query_start)[rows]
        if query_lens.sum() == 0:
            return None, None
        subset = copy.copy(common)
        subset.num_reqs = len(rows)
        subset.num_actual_tokens = int(query_lens.sum())
        subset.max_query_len = int(query_lens.max())
        subset_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=subset_start[1:])
        subset.query_start_loc = torch.from_numpy(subset_start)
        index = torch.from_numpy(rows)
        subset.seq_lens = common.seq_lens[index]
        subset.block_table_tensor = common.block_table_tensor[index]
        is_stock = np.repeat(plan.stock_rows, np.diff(query_start))
        return super().build(0, subset), torch.from_numpy(np.flatnonzero(is_stock))
