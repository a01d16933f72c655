"""The KV cache spec of a bounded layer: vLLM sizes, groups and reports it through this.

Importing this module registers the spec with vLLM, in the way vLLM documents
(`register_kv_cache_spec` at the class). The engine core first meets the class when it unpickles
the worker's specs, so the registration has to travel with the class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_bounded_kv.engine.blocks import BoundedBlockManager
from vllm_bounded_kv.engine.header import HEADER_LEN
from vllm_bounded_kv.engine.policy import EnginePolicy, StreamPolicy

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class BoundedAttentionSpec(AttentionSpec):
    """Full attention whose cache is a fixed slot of `max_sink + max_ring + spare` entries.

    Derived from `AttentionSpec`, not `FullAttentionSpec`: the latter's `merge` drops new fields,
    and connectors take it for slot-stable.
    """

    max_sink: int
    max_ring: int
    spare: int

    @property
    def slot_blocks(self) -> int:
        """Blocks of the largest slot."""
        largest = StreamPolicy(self.max_sink, self.max_ring, self.spare)
        return largest.num_blocks(self.block_size)

    @property
    def uses_slot_mapping(self) -> bool:
        """False: the metadata builder maps positions to slots itself."""
        return False

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of one slot of this layer, whatever the model's length."""
        return self.slot_blocks * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Entries of a block row: the header, then the slot's blocks."""
        return HEADER_LEN + self.slot_blocks


def bounded_spec(spec: AttentionSpec, policy: EnginePolicy) -> AttentionSpec:
    """The bounded version of a full-attention layer's spec; any other spec is left alone."""
    if type(spec) is not FullAttentionSpec or spec.head_size_v != spec.head_size:
        return spec
    return replace_as(
        spec,
        BoundedAttentionSpec,
        drop=("sliding_window", "attention_chunk_size", "non_causal"),
        max_sink=policy.largest.sink,
        max_ring=policy.largest.ring,
        spare=policy.largest.spare,
    )


# `register` on an empty registry would make vLLM believe that its own specs are in it already.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(BoundedAttentionSpec, BoundedBlockManager)
