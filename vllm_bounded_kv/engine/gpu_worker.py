"""The GPU worker: vLLM's, with the bounded backend in its layers, for the V2 model runner.

Not run on a GPU yet: see `docs/design.md`, "GPUs".
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers
from vllm.v1.worker.gpu_worker import Worker

from vllm_bounded_kv.attention.paged import Turns
from vllm_bounded_kv.engine import compat, rope
from vllm_bounded_kv.engine.bounded_worker import BoundedWorkerMixin
from vllm_bounded_kv.engine.gpu_backend import BoundedGPUAttentionBackend
from vllm_bounded_kv.engine.gpu_metadata import BoundedGPUMetadataBuilder

logger = init_logger("vllm.bounded_kv.worker")


class BoundedGPUWorker(BoundedWorkerMixin, Worker):
    """vLLM's GPU worker over bounded slots."""

    backend = BoundedGPUAttentionBackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        logger.warning(
            "--kv-plugin bounded: its CUDA kernels and backend have been tested in Triton's "
            "interpreter, but not run on a GPU. Run scripts/gpu-check first, and compare answers "
            "with those of a CPU."
        )
        backend = self.backend
        # Both for good: the runner itself asks for specs when it profiles its graphs, and the
        # config names CUSTOM to whoever asks later.
        backend.policy = self.bounded_policy
        register_backend(
            AttentionBackendEnum.CUSTOM, f"{backend.__module__}.{backend.__qualname__}"
        )

    def has_shared_layers(self) -> bool:
        """Whether layers read other layers' caches."""
        return bool(get_shared_kv_cache_layers(self.vllm_config))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache; then give builders and model the positions that fall back."""
        super().initialize_from_config(kv_cache_config)
        limit = self.bounded_policy.position_limit
        if limit is None:
            return
        runner: Any = self.model_runner
        assert self.device is not None
        rotary = rope.rotary_of(runner.model, self.specs, limit)
        turns = Turns.of(rotary.frequencies, rotary.is_neox, self.device)
        builders: list[BoundedGPUMetadataBuilder] = [
            builder
            for groups in runner.attn_groups
            for group in groups
            for builder in group.metadata_builders
        ]
        for builder in builders:
            assert isinstance(builder, BoundedGPUMetadataBuilder)
            builder.turns = turns
        # All of them plan the same rows, each from its own block table.
        compat.give_positions(runner.model_state, builders[0].positions)
