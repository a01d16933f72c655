"""The row header: how a stream's policy reaches the attention metadata builder.

The builder sees block rows, never request ids. So a bounded request's row starts with two
numbers that look like block ids, its sink and its ring; the blocks of its slot follow. Rows that
vLLM pads with zeros have ring 0: no stream.
"""

from __future__ import annotations

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_bounded_kv.engine.policy import StreamPolicy

SINK, RING = 0, 1
HEADER_LEN = 2


def header_blocks(policy: StreamPolicy) -> list[KVCacheBlock]:
    """The header, as the block objects that vLLM's bookkeeping expects. Never freed."""
    return [KVCacheBlock(block_id=policy.sink), KVCacheBlock(block_id=policy.ring)]
