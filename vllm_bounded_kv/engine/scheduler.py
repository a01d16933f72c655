"""The scheduler's side of the plugin: pins policies, caps hashing, reports figures.

vLLM's scheduler does the scheduling. A mixin adds to it what concerns slots, once for the plain
scheduler and once for the asynchronous one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_bounded_kv.engine import compat
from vllm_bounded_kv.engine.blocks import BoundedBlockManager
from vllm_bounded_kv.engine.policy import EnginePolicy, StreamPolicy
from vllm_bounded_kv.engine.settings import policy_of
from vllm_bounded_kv.engine.slots import divide
from vllm_bounded_kv.engine.sources import PinnedSources, SourceError, handle
from vllm_bounded_kv.engine.spec import BoundedAttentionSpec
from vllm_bounded_kv.engine.stats import EngineFigures, StreamFigures
from vllm_bounded_kv.positions import next_fallback

logger = init_logger("vllm.bounded_kv.scheduler")


class BoundedSchedulerMixin:
    """Adds bounded streams to one of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        compat.install_engine_core_hooks()
        compat.drain_notifications()
        policy = policy_of(self.vllm_config)  # type: ignore[attr-defined]
        assert policy is not None
        self.bounded_policy: EnginePolicy = policy
        self.streams: dict[str, StreamPolicy] = {}
        coordinator = self.kv_cache_manager.coordinator  # type: ignore[attr-defined]
        (manager,) = coordinator.single_type_managers
        assert isinstance(manager, BoundedBlockManager)
        manager.streams = self.streams
        self.bounded_manager = manager
        self._wraps_of_released = 0
        self._wraps_read = 0
        self._draft_only_what_is_drafted()
        self._set_slots()

    def _draft_only_what_is_drafted(self) -> None:
        """Keep vLLM from padding a request of one token with drafts that are none: nobody cuts them
        where positions fall back. It does so for CUDA graphs, unless drafts go by the size of the
        batch: so they do, the same for each."""
        num_drafts = self.bounded_policy.num_draft_tokens
        if num_drafts and self.dynamic_sd_lookup is None:  # type: ignore[has-type]
            max_rows = self.vllm_config.scheduler_config.max_num_seqs  # type: ignore[attr-defined]
            self.dynamic_sd_lookup = [num_drafts] * (max_rows + 1)

    def _set_slots(self) -> None:
        spec = self.bounded_manager.kv_cache_spec
        assert isinstance(spec, BoundedAttentionSpec)
        (group,) = self.kv_cache_config.kv_cache_groups  # type: ignore[attr-defined]
        config = self.vllm_config  # type: ignore[attr-defined]
        # The group is one worker's: of a pipeline's stage its layers, of a tensor-parallel worker
        # its heads.
        num_layers = len(group.layer_names)
        if config.parallel_config.pipeline_parallel_size > 1:
            num_layers = config.model_config.get_total_num_hidden_layers()
        num_workers = config.parallel_config.tensor_parallel_size
        slots = divide(
            self.bounded_policy,
            block_size=spec.block_size,
            block_bytes=spec.page_size_bytes * num_layers * num_workers,
            pool_blocks=self.bounded_manager.block_pool.num_gpu_blocks - 1,  # one is the null block
            max_active=self.max_num_active_reqs,  # type: ignore[has-type]
        )
        wanted = self.bounded_policy.max_slots
        if wanted is not None:
            self.max_num_active_reqs = min(self.max_num_active_reqs, wanted)  # type: ignore[has-type]
        self.num_slots = slots.num_slots
        self.slot_blocks = slots.slot_blocks
        self.block_bytes = slots.block_bytes
        self.sources = PinnedSources(
            self.bounded_manager.block_pool,
            slots.max_pinned_blocks,
            spec.block_size,
            self.block_bytes,
        )
        logger.info("%s", slots)

    def add_request(self, request: Request) -> None:
        """Pin the stream's policy; later pieces of a streaming input do not change it."""
        request_id = request.request_id
        if request_id not in self.requests:  # type: ignore[attr-defined]
            policy = self.request_policy(request)
            self.streams[request_id] = policy
            _cap_hashing(request, policy.num_immutable_blocks(self.bounded_manager.block_size))
        super().add_request(request)  # type: ignore[misc]

    def request_policy(self, request: Request) -> StreamPolicy:
        """The policy that a request asks for.

        Raises:
            PolicyError: when the server does not allow it.
        """
        params = request.sampling_params
        # That the prompt contains the source is for the front end to check: a session's first piece
        # need not, and the stand-in that ends a session has one token.
        return self.bounded_policy.for_request(
            params.extra_args if params is not None else None, num_prompt_tokens=None
        )

    def pinnable(
        self,
        token_ids: list[int],
        salt: str | None,
        field: str,
        hasher: Callable[[Request], list[BlockHash]] | None,
    ) -> Sequence[BlockHash]:
        """Hashes of the blocks that a source of these tokens would hold.

        Args:
            token_ids: the source.
            salt: of the tenant.
            field: what the client gave it in.
            hasher: vLLM's; `None` where prefix caching is off.

        Raises:
            SourceError: when it is longer than the server allows, or no block of it can be shared.
        """
        length, limit = len(token_ids), self.bounded_policy.max_source_len
        if length > limit:
            raise SourceError(
                400,
                field,
                f"{field}: the source has {length} tokens, more than this server's limit {limit} "
                "(--bounded-kv-max-source-len)",
            )
        # A request adds a token of its own, and gets one at least.
        longest = self.max_model_len - 2  # type: ignore[attr-defined]
        if length > longest:
            raise SourceError(
                400,
                field,
                f"{field}: the source has {length} tokens, and more than {longest} leave no room "
                f"for a request within max_model_len={longest + 2}",
            )
        if hasher is None:
            raise SourceError(400, "name", "prefix caching is off (--no-enable-prefix-caching)")
        block_size = self.bounded_manager.block_size
        policy = self.bounded_policy.for_request({"kv_source_len": length}, length)
        num_blocks = min(length // block_size, policy.num_immutable_blocks(block_size))
        if not num_blocks:
            kept = min(length, policy.sink)
            raise SourceError(
                400,
                field,
                f"{field}: the server keeps {kept} of the source's {length} tokens, which fill no "
                f"block of {block_size}: nothing of it could be shared; use a longer one, or a "
                "smaller --block-size",
            )
        request = Request(
            request_id="source",
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=hasher,
        )
        return request.block_hashes[:num_blocks]

    def bounded_kv_sources(
        self,
        action: str,
        values: dict[str, Any],
        hasher: Callable[[Request], list[BlockHash]] | None,
    ) -> dict[str, Any]:
        """Serve an API server's call about pinned sources: see `sources.handle`."""
        return handle(
            self.sources,
            action,
            values,
            lambda token_ids, salt, field: self.pinnable(token_ids, salt, field, hasher),
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, after sources whose time is over have given their blocks back."""
        self.sources.expire()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """vLLM's; pinned sources survive it.

        With `reset_running_requests`, what is cached is no longer right (vLLM asks for it when
        weights change): they are computed again by the next request that uses them.
        """
        with self.sources.set_aside(keep=not reset_running_requests):
            reset: bool = super().reset_prefix_cache(  # type: ignore[misc]
                reset_running_requests, reset_connector
            )
        return reset

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """vLLM's; a draft is cut where rotary positions fall back.

        Beyond, it would turn the ring's keys, and a rejected one does not turn them back.
        """
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]
        limit = self.bounded_policy.position_limit
        if limit is None:
            return
        for request_id in draft_token_ids.req_ids:
            request = self.requests.get(request_id)  # type: ignore[attr-defined]
            if request is not None and request.spec_token_ids:
                capacity = self.streams[request_id].capacity
                room = next_fallback(request.num_tokens, capacity, limit) - request.num_tokens
                request.spec_token_ids = request.spec_token_ids[:room]

    def _handle_stopped_request(self, request: Request) -> bool:
        """vLLM's; a session's turn may end within an accepted draft, and goes on from there."""
        if self.bounded_policy.num_draft_tokens:
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        finished: bool = super()._handle_stopped_request(request)  # type: ignore[misc]
        return finished

    def _free_blocks(self, request: Request) -> None:
        self.sources.settle()
        super()._free_blocks(request)  # type: ignore[misc]
        policy = self.streams.pop(request.request_id)
        self._wraps_of_released += policy.num_wraps(request.num_computed_tokens)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Its ring will start over again from the first entry; what it has done still counts."""
        policy = self.streams[request.request_id]
        self._wraps_of_released += policy.num_wraps(request.num_computed_tokens)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def bounded_kv_figures(self, mark_read: bool = False) -> dict[str, Any]:
        """The cache as it stands, as plain values.

        Args:
            mark_read: the reader adds `ring_wraps_unread` to a counter of its own; do not hand
                them out again.
        """
        self.sources.expire()
        pool = self.bounded_manager.block_pool
        pinned = {block.block_id for block in self.sources.blocks()}
        held = set()
        shared = 0
        streams = []
        requests = self.requests  # type: ignore[attr-defined]
        for request_id, policy in self.streams.items():
            slot = self.bounded_manager.slot(request_id)
            if not slot:
                continue
            for block in slot[: self.bounded_manager.num_shareable(request_id)]:
                if block.block_id not in held:
                    held.add(block.block_id)
                    shared += block.ref_cnt - (block.block_id in pinned) > 1
            position = requests[request_id].num_computed_tokens
            retained = policy.num_retained(position)
            streams.append(
                StreamFigures(
                    request_id=request_id,
                    position=position,
                    retained=retained,
                    evicted=position - retained,
                    blocks=len(slot),
                    sink=policy.sink,
                    window=policy.ring,
                )
            )
        wraps = self._wraps_of_released + sum(
            self.streams[s.request_id].num_wraps(s.position) for s in streams
        )
        unread = wraps - self._wraps_read
        if mark_read:
            self._wraps_read = wraps
        return EngineFigures(
            slots_total=self.num_slots,
            slots_used=len(streams),
            slot_bytes=self.slot_blocks * self.block_bytes,
            slot_blocks=self.slot_blocks,
            block_size=self.bounded_manager.block_size,
            block_bytes=self.block_bytes,
            pool_blocks=pool.num_gpu_blocks - 1,
            pool_blocks_free=pool.get_num_free_blocks(),
            source_blocks_held=len(held),
            source_blocks_shared=shared,
            sources=self.sources.num_sources,
            pinned_blocks=self.sources.num_blocks,
            max_pinned_blocks=self.sources.max_blocks,
            ring_wraps=wraps,
            ring_wraps_unread=unread,
            streams=streams,
        ).to_dict()

    def check_integrity(self) -> None:
        """Raise `AssertionError` with the sums that do not add up.

        Every block is free or held, as often as its reference count says; every running stream
        holds exactly its slot.
        """
        pool = self.bounded_manager.block_pool
        references: dict[int, int] = {}
        for block in itertools.chain(self.bounded_manager.held_blocks(), self.sources.blocks()):
            references[block.block_id] = references.get(block.block_id, 0) + 1
            assert block.ref_cnt > 0, f"held block {block.block_id} has no reference"
        for block in pool.blocks:
            counted = references.get(block.block_id, 0)
            if not block.is_null:
                assert block.ref_cnt == counted, (
                    f"block {block.block_id}: {block.ref_cnt} references, {counted} holders"
                )
        free, total = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
        assert free + len(references) == total, f"{free} free + {len(references)} held != {total}"
        for request_id, policy in self.streams.items():
            slot = self.bounded_manager.slot(request_id)
            expected = policy.num_blocks(self.bounded_manager.block_size)
            assert len(slot) in (0, expected), f"{request_id}: {len(slot)} blocks, not {expected}"
        stray = set(self.bounded_manager.req_to_blocks) - set(self.streams)
        assert not stray, f"blocks held by unknown streams {stray}"


class BoundedScheduler(BoundedSchedulerMixin, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with bounded streams."""


class BoundedAsyncScheduler(BoundedSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with bounded streams."""


def _cap_hashing(request: Request, num_blocks: int) -> None:
    """Hash the stream's first `num_blocks` blocks and no more.

    What lies beyond is overwritten, so a hit there would be wrong, and hashing an endless stream
    would never end.
    """
    del request.block_hashes[num_blocks:]
    hasher: Callable[[Request], list[Any]] | None = request._block_hasher
    if hasher is None:
        return

    def capped(request: Request) -> list[Any]:
        missing = num_blocks - len(request.block_hashes)
        return hasher(request)[:missing] if missing > 0 else []

    request._block_hasher = capped
