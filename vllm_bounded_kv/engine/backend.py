"""The CPU attention backend: vLLM's, with the cache update and the wrapped rows done here.

Order within a layer, which sharing depends on (a request may hit, in the same step, a source
block that another request is only now writing):

1. turn the keys of rings whose positions fall back, 2. clear the tails of blocks that become
partly filled, 3. write everything that destroys nothing, 4. attend, 5. overwrite ring entries,
each by its last writer, 6. turn what a step of several tokens leaves behind.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_bounded_kv.engine import ranged
from vllm_bounded_kv.engine.metadata import (
    BoundedCPUMetadata,
    BoundedCPUMetadataBuilder,
    TurnKeys,
)
from vllm_bounded_kv.engine.policy import EnginePolicy
from vllm_bounded_kv.engine.refusals import check_layer
from vllm_bounded_kv.engine.spec import bounded_spec


class BoundedCPUAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend over bounded slots."""

    forward_includes_kv_cache_update = True

    policy: ClassVar[EnginePolicy | None] = None
    """The policy of the worker that is asking its layers for specs; vLLM's hook passes none."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation that a layer instantiates."""
        return BoundedCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[BoundedCPUMetadataBuilder]:
        """The builder that the runner instantiates per group."""
        return BoundedCPUMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bound a full-attention layer."""
        return spec if cls.policy is None else bounded_spec(spec, cls.policy)


class BoundedCPUAttentionImpl(CPUAttentionBackendImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_layer(
            alibi_slopes=self.alibi_slopes is not None,
            logits_soft_cap=bool(self.logits_soft_cap),
            sinks=self.sinks is not None,
            sliding_window=self.sliding_window != -1,
            kv_sharing=self.kv_sharing_target_layer_name is not None,
            attn_type=self.attn_type,
        )

    def forward(  # type: ignore[override]
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: BoundedCPUMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Update the cache and attend.

        Args:
            layer: the attention layer.
            query: `[N, H, D]`.
            key: `[N, H_kv, D]`, rotated already.
            value: `[N, H_kv, D]`.
            kv_cache: `[num_blocks, H_kv, block_size, 2 * D]`, in the CPU kernel's own packing.
            attn_metadata: of this step; `None` in warm-up.
            output: `[N, H, D]`, written in place.
            output_scale: fused output quantisation, which this backend does not do.
            output_block_scale: as `output_scale`.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported")
        if attn_metadata is None:
            return output
        meta = attn_metadata
        if meta.turn_first is not None:
            turn(kv_cache, meta.turn_first)
        if meta.new_partial_blocks is not None:
            kv_cache[meta.new_partial_blocks] = 0
        self.do_kv_cache_update(layer, key, value, kv_cache, meta.slot_mapping)
        self._attend_stock(layer, query, key, value, kv_cache, meta, output)
        for row in meta.ranged:
            self._attend_ranged(row, query, key, value, kv_cache, output)
        if meta.late_tokens is not None:
            assert meta.late_slots is not None
            self.do_kv_cache_update(
                layer, key[meta.late_tokens], value[meta.late_tokens], kv_cache, meta.late_slots
            )
        if meta.turn_last is not None:
            turn(kv_cache, meta.turn_last)
        return output

    def _attend_stock(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: BoundedCPUMetadata,
        output: torch.Tensor,
    ) -> None:
        if meta.stock is None:
            return
        if meta.stock_tokens is None:
            super().forward(layer, query, key, value, kv_cache, meta.stock, output)
            return
        part = torch.empty_like(output[: len(meta.stock_tokens)])
        super().forward(layer, query[meta.stock_tokens], key, value, kv_cache, meta.stock, part)
        output[meta.stock_tokens] = part

    def _attend_ranged(
        self,
        row: ranged.RangedAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        keys, values = unpack(kv_cache, row.slots)
        ranged.attend(
            row,
            query[row.tokens],
            torch.cat([keys, key[row.tokens]]),
            torch.cat([values, value[row.tokens]]),
            output[row.tokens],
            self.scale,
        )


def halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[num_blocks, H_kv, D, block]` and values `[num_blocks, H_kv, block, D]`, as views."""
    num_blocks, num_heads, block_size, width = kv_cache.shape
    head_dim = width // 2
    packed = kv_cache.view(num_blocks, num_heads, 2, block_size * head_dim)
    keys = packed[:, :, 0].unflatten(-1, (head_dim, block_size))
    values = packed[:, :, 1].unflatten(-1, (block_size, head_dim))
    return keys, values


def turn(kv_cache: torch.Tensor, what: TurnKeys) -> None:
    """Turn cached keys in place."""
    keys, _ = halves(kv_cache)
    block, offset = what.slots // kv_cache.shape[2], what.slots % kv_cache.shape[2]
    turned = what.rotation(keys[block, :, :, offset].transpose(0, 1))  # [H_kv, n, D]
    keys[block, :, :, offset] = turned.transpose(0, 1)


def unpack(kv_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read entries from the CPU kernel's packing: per block and head, keys `[D, block]`, then
    values `[block, D]` (vllm/csrc/cpu/cpu_attn_impl.hpp, 0.32.0).

    Args:
        kv_cache: `[num_blocks, H_kv, block_size, 2 * D]`.
        slots: `[m]` int64.

    Returns:
        keys and values, `[m, H_kv, D]` each.
    """
    keys, values = halves(kv_cache)
    block, offset = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    return keys[block, :, :, offset], values[block, :, offset]
