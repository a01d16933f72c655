"""The scheduler's side of a slot: which blocks of vLLM's pool a stream holds.

A stream takes all its blocks when it is admitted (minus the shared ones it hits) and none later.
Full blocks inside the sink are never overwritten and depend on the prefix alone, so they are
hashed and shared through vLLM's prefix cache; ring blocks never are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request

from vllm_bounded_kv.engine.header import HEADER_LEN, header_blocks
from vllm_bounded_kv.engine.policy import StreamPolicy


class BoundedBlockManager(SingleTypeKVCacheManager):
    """Fixed slots of blocks. `streams` maps request ids to policies; the scheduler owns it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams: Mapping[str, StreamPolicy] = {}

    def slot(self, request_id: str) -> list[KVCacheBlock]:
        """The stream's blocks, header stripped; empty when it holds none."""
        return self.req_to_blocks.get(request_id, [])[HEADER_LEN:]

    def num_shareable(self, request_id: str) -> int:
        """How many of the stream's leading blocks are hashed by now."""
        return self.num_cached_block.get(request_id, 0)

    def _has_slot(self, request_id: str) -> bool:
        return bool(self.req_to_blocks.get(request_id))

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """The whole slot for a stream that has none, nothing for one that does."""
        if self._has_slot(request_id):
            return 0
        num_blocks = self.streams[request_id].num_blocks(self.block_size)
        # A hit that nobody holds leaves the free queue when it is touched.
        evictable = self._get_num_evictable_blocks(new_computed_blocks)
        return num_blocks - len(new_computed_blocks) + evictable

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Take the rest of the slot behind the shared hits, once."""
        hits = self.req_to_blocks[request_id]
        policy = self.streams[request_id]
        num_blocks = policy.num_blocks(self.block_size)
        if len(hits) == HEADER_LEN + num_blocks:
            return []
        new_blocks = self.block_pool.get_new_blocks(num_blocks - len(hits))
        self.req_to_blocks[request_id] = [*header_blocks(policy), *hits, *new_blocks]
        return new_blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Hash the full blocks inside the sink that `num_tokens` has filled."""
        request_id = request.request_id
        num_cached = self.num_cached_block.get(request_id, 0)
        immutable = self.streams[request_id].num_immutable_blocks(self.block_size)
        num_full = min(num_tokens // self.block_size, immutable)
        if num_cached >= num_full:
            return
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.slot(request_id),
            num_cached_blocks=num_cached,
            num_full_blocks=num_full,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
        )
        self.num_cached_block[request_id] = num_full

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Give up the slot; the header is not the pool's."""
        return super().pop_blocks_for_free(request_id)[HEADER_LEN:]

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest cached run of the request's own immutable blocks.

        `block_hashes` ends where the request's sink does (the scheduler caps the hasher), so a
        hit can never reach a block that the stream will overwrite.
        """
        hits: tuple[list[KVCacheBlock], ...] = tuple([] for _ in kv_cache_group_ids)
        for block_hash, _ in zip(
            block_hashes, range(max_length // kv_cache_spec.block_size), strict=False
        ):
            cached = block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            if not cached:
                break
            for group_hits, block in zip(hits, cached, strict=True):
                group_hits.append(block)
        return hits, len(hits[0]) * kv_cache_spec.block_size

    def held_blocks(self) -> Iterator[KVCacheBlock]:
        """Every block reference that streams hold: a shared block once per holder."""
        for request_id in self.req_to_blocks:
            yield from self.slot(request_id)
