"""The CPU worker: loads the model with the bounded backend and tells vLLM's V1 runner what it must
not do itself."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.block_table import SlotMappingMode
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_bounded_kv.engine import compat, rope
from vllm_bounded_kv.engine.backend import BoundedCPUAttentionBackend
from vllm_bounded_kv.engine.bounded_worker import BoundedWorkerMixin
from vllm_bounded_kv.engine.metadata import BoundedCPUMetadataBuilder


class BoundedCPUWorker(BoundedWorkerMixin, CPUWorker):
    """vLLM's CPU worker over bounded slots."""

    backend = BoundedCPUAttentionBackend

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model; its attention layers pick up the bounded backend."""
        compat.rewind_cpu_generators(self.model_runner)
        if self.vllm_config.lora_config is not None:
            compat.leave_rows_without_adapter_alone()
        with compat.cpu_attention_backend(self.backend):
            return super().load_model(*args, **kwargs)

    def has_shared_layers(self) -> bool:
        """Whether layers read other layers' caches."""
        return bool(self.model_runner.shared_kv_cache_layers)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache and stop the V1 runner from mapping slots.

        It ignores `uses_slot_mapping`, and would read a block row at `position // block_size`,
        far beyond the row.
        """
        super().initialize_from_config(kv_cache_config)
        for table in self.model_runner.input_batch.block_table.block_tables:
            table.slot_mapping_mode = SlotMappingMode.NONE
            table.slot_mapping.np.fill(-1)
        self._give_rotary()

    def _give_rotary(self) -> None:
        limit = self.bounded_policy.position_limit
        if limit is None:
            return
        rotary = rope.rotary_of(self.model_runner.model, self.specs, limit)
        for groups in self.model_runner.attn_groups:
            for group in groups:
                builder = group.get_metadata_builder()
                assert isinstance(builder, BoundedCPUMetadataBuilder)
                builder.rotary = rotary
