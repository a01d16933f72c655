"""The GPU attention backend: one Triton kernel for all rows, in the order that `backend` gives.

Not run on a GPU yet: see `docs/design.md`, "GPUs". The tests run it in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_bounded_kv.attention import triton_paged, triton_paged_cache
from vllm_bounded_kv.engine.gpu_metadata import BoundedGPUMetadata, BoundedGPUMetadataBuilder
from vllm_bounded_kv.engine.policy import EnginePolicy
from vllm_bounded_kv.engine.refusals import check_layer
from vllm_bounded_kv.engine.spec import bounded_spec

MIN_HEAD_SIZE, MAX_HEAD_SIZE = 16, 256


class BoundedGPUAttentionBackend(AttentionBackend):
    """Attention over bounded slots, for vLLM's `CUSTOM` backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    policy: ClassVar[EnginePolicy | None] = None
    """As `BoundedCPUAttentionBackend.policy`."""

    @staticmethod
    def get_name() -> str:
        """vLLM's name for whatever is registered as such."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[BoundedGPUAttentionImpl]:
        """The implementation that a layer instantiates."""
        return BoundedGPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[BoundedGPUMetadataBuilder]:
        """The builder that the runner instantiates per group."""
        return BoundedGPUMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Tiles hold whole heads."""
        return MIN_HEAD_SIZE <= head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """They would take the row header for blocks."""
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bound a full-attention layer."""
        return spec if cls.policy is None else bounded_spec(spec, cls.policy)


class BoundedGPUAttentionImpl(AttentionImpl[Any]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        check_layer(
            alibi_slopes=alibi_slopes is not None,
            logits_soft_cap=bool(logits_soft_cap),
            sinks=sinks is not None,
            sliding_window=sliding_window is not None,
            kv_sharing=kv_sharing_target_layer_name is not None,
            attn_type=attn_type,
            # Of what other kernels know: these are the values that ask for nothing.
            others=[name for name, value in others.items() if value not in (None, False, -1)],
        )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: BoundedGPUMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Update the cache and attend.

        Args:
            layer: the attention layer.
            query: `[N or more, H, D]`, rotated.
            key, value: `[N or more, H_kv, D]`.
            kv_cache: `[num_blocks, H_kv, block_size, 2 * D]`, in any order of memory.
            attn_metadata: of this step; `None` in profiling.
            output: `[N or more, H, D]`, written in place.
            output_scale: fused output quantisation, which this backend does not do.
            output_block_scale: as `output_scale`.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported")
        if attn_metadata is None:
            return output.fill_(0)
        meta, n = attn_metadata, attn_metadata.num_actual_tokens
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        query, key, value = query[:n], key[:n], value[:n]
        rows, turns = (meta.table, meta.block_table), meta.turns
        if turns is not None:
            triton_paged_cache.turn_first(keys, *rows, turns)
        triton_paged_cache.store(key, value, keys, values, meta.slots)
        triton_paged.attend(
            query, key, value, keys, values, *rows, self.scale, turns, out=output[:n]
        )
        triton_paged_cache.store(key, value, keys, values, meta.late_slots)
        if turns is not None:
            triton_paged_cache.turn_last(keys, *rows, turns)
        return output
