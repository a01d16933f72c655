"""What is patched, called or read of vLLM beyond what our imports and subclasses tell.

Texts are as `ast.unparse` writes them. They are what a patch, or a comment of ours, takes for
granted: where one is gone, somebody has to look.
"""

from __future__ import annotations

from dataclasses import dataclass

PATCHED, CALLED, READ = "patched", "called", "read"


@dataclass(frozen=True)
class Seam:
    """One place of vLLM's."""

    kind: str
    module: str
    name: str
    texts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module.removeprefix('vllm.')}: {self.name}"


_ENGINE = "vllm.v1.engine"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_LORA = "vllm.lora.ops.torch_ops.lora_ops"

SEAMS = (
    # --- patched, in the order of `compat.py`
    Seam(PATCHED, "vllm.engine.arg_utils", "EngineArgs.add_cli_args", ("--additional-config",)),
    Seam(
        PATCHED,
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        ("additional_config=self.additional_config",),
    ),
    Seam(READ, "vllm.envs", "_is_envs_cache_enabled"),
    Seam(READ, "vllm.envs", "disable_envs_cache"),
    Seam(READ, "vllm.envs", "enable_envs_cache"),
    Seam(
        READ,
        "vllm.config.model",
        "_get_and_verify_max_len",
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN",),
    ),
    Seam(PATCHED, f"{_ENGINE}.input_processor", "InputProcessor.process_inputs"),
    Seam(PATCHED, f"{_ENGINE}.async_llm", "AsyncLLM.generate"),
    Seam(
        PATCHED,
        f"{_ENGINE}.async_llm",
        "AsyncLLM._add_streaming_input_request",
        (
            "TokensPrompt(prompt_token_ids=[0])",
            "async for input_chunk in input_stream",
            "queue._input_stream_task = asyncio.create_task(handle_inputs())",
            "return queue",
        ),
    ),
    Seam(CALLED, f"{_ENGINE}.output_processor", "RequestOutputCollector.put"),
    Seam(
        PATCHED,
        f"{_ENGINE}.core",
        "EngineCore.preprocess_add_request",
        ("Request.from_engine_core_request(", "return (req, "),
    ),
    Seam(READ, f"{_ENGINE}.core", "EngineCore.request_block_hasher"),
    Seam(CALLED, f"{_ENGINE}.core_client", "AsyncMPClient.call_utility_all_async"),
    Seam(READ, f"{_ENGINE}.core_client", "AsyncMPClient.engine_ranks_managed"),
    # --- how a server ends (`end.py`)
    Seam(READ, f"{_ENGINE}.async_llm", "AsyncLLM.errored"),
    Seam(READ, f"{_ENGINE}.core_client", "MPClient._finalizer"),
    Seam(READ, f"{_ENGINE}.core_client", "BackgroundResources.engine_manager"),
    Seam(READ, f"{_ENGINE}.utils", "CoreEngineProcManager.failed_proc_name"),
    Seam(READ, "vllm.entrypoints.launchers.launcher", "serve_http", ("app.state.server = server",)),
    # --- patched, further
    Seam(PATCHED, "vllm.plugins", "load_endpoint_plugins", ("required_tasks",)),
    Seam(
        PATCHED,
        f"{_ENGINE}.detokenizer",
        "BaseIncrementalDetokenizer.get_next_output_text",
        ("self._last_output_text_offset", "self.output_text"),
    ),
    Seam(
        PATCHED,
        "vllm.distributed.device_communicators.shm_broadcast",
        "SpinCondition.record_read",
    ),
    Seam(
        READ,
        "vllm.distributed.device_communicators.shm_broadcast",
        "SpinCondition.local_notify_socket",
    ),
    Seam(PATCHED, _LORA, "bgmv_shrink", ("lora_b_weights[lora_indices_tensor]",)),
    Seam(PATCHED, _LORA, "bgmv_expand", ("lora_b_weights[lora_indices_tensor]",)),
    Seam(PATCHED, _LORA, "bgmv_expand_slice", ("lora_b_weights[lora_indices_tensor]",)),
    Seam(PATCHED, "vllm.lora.punica_wrapper.punica_cpu", "bgmv_shrink"),
    Seam(PATCHED, "vllm.lora.punica_wrapper.punica_cpu", "bgmv_expand"),
    Seam(PATCHED, "vllm.lora.punica_wrapper.punica_cpu", "bgmv_expand_slice"),
    Seam(PATCHED, _RUNNER, "GPUModelRunner._sample"),
    Seam(
        PATCHED,
        _RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        (
            "self.discard_request_mask.np[:num_reqs]",
            "gen = self.input_batch.generators.get(int(i))",
            "gen.set_offset(gen.get_offset() - 4)",
        ),
    ),
    Seam(READ, "vllm.v1.attention.backends.registry", "_ATTN_OVERRIDES"),
    Seam(CALLED, "vllm.v1.attention.backends.registry", "AttentionBackendEnum.clear_override"),
    Seam(READ, "vllm.v1.attention.selector", "_cached_get_attn_backend"),
    Seam(
        READ,
        "vllm.platforms.cpu",
        "CpuPlatform.get_attn_backend_cls",
        ("return AttentionBackendEnum.CPU_ATTN.get_path()",),
    ),
    Seam(PATCHED, "vllm.v1.worker.gpu.model_states.interface", "ModelState.prepare_inputs"),
    Seam(PATCHED, "vllm.v1.worker.gpu.model_states.interface", "ModelState.prepare_dummy_inputs"),
    # --- the scheduler's side
    Seam(CALLED, "vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry._ensure_registered"),
    Seam(CALLED, "vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry.register"),
    Seam(CALLED, "vllm.v1.kv_cache_interface", "replace_as"),
    Seam(READ, "vllm.v1.kv_cache_interface", "AttentionSpec.page_size_bytes"),
    Seam(
        READ,
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.cache_blocks",
        ("manager.cache_blocks(", "replay_boundaries="),
    ),
    Seam(
        READ,
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.allocate_slots",
        (
            "self.coordinator.get_num_blocks_to_allocate(",
            "self.coordinator.cache_blocks(",
        ),
    ),
    # All that touches block rows, whose first two entries are no blocks.
    Seam(READ, "vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager"),
    Seam(READ, "vllm.v1.core.kv_cache_manager", "KVCacheManager"),
    Seam(READ, "vllm.v1.core.kv_cache_coordinator", "UnitaryKVCacheCoordinator"),
    Seam(CALLED, "vllm.v1.core.block_pool", "BlockPool.touch"),
    Seam(CALLED, "vllm.v1.core.block_pool", "BlockPool.free_blocks", ("block.ref_cnt -= 1",)),
    Seam(CALLED, "vllm.v1.core.block_pool", "BlockPool.get_cached_block"),
    Seam(CALLED, "vllm.v1.core.block_pool", "BlockPool.get_new_blocks"),
    Seam(CALLED, "vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks"),
    Seam(CALLED, "vllm.v1.core.block_pool", "BlockPool.cache_full_blocks"),
    Seam(CALLED, "vllm.v1.core.block_pool", "BlockPool._insert_block_hash"),
    Seam(READ, "vllm.v1.core.kv_cache_utils", "KVCacheBlock.ref_cnt"),
    Seam(READ, "vllm.v1.core.kv_cache_utils", "KVCacheBlock.block_hash_num_tokens"),
    Seam(READ, "vllm.v1.core.kv_cache_utils", "KVCacheBlock.is_null"),
    Seam(
        READ,
        "vllm.v1.core.sched.scheduler",
        "Scheduler.schedule",
        ("self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None",),
    ),
    Seam(READ, "vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),
    Seam(READ, "vllm.v1.core.sched.scheduler", "Scheduler.dynamic_sd_lookup"),
    Seam(READ, "vllm.v1.core.sched.scheduler", "Scheduler.max_num_active_reqs"),
    Seam(
        READ,
        "vllm.v1.request",
        "Request.update_block_hashes",
        ("self.block_hashes.extend(self._block_hasher(self))",),
    ),
    Seam(READ, "vllm.v1.request", "Request._block_hasher"),
    Seam(READ, "vllm.v1.request", "Request.spec_token_ids"),
    # --- the worker's side
    Seam(READ, "vllm.v1.attention.backend", "AttentionBackend.customize_spec"),
    Seam(
        READ,
        "vllm.v1.attention.backend",
        "AttentionBackend.forward_includes_kv_cache_update",
    ),
    Seam(READ, "vllm.v1.attention.backend", "CommonAttentionMetadata.positions"),
    Seam(READ, "vllm.v1.attention.backend", "CommonAttentionMetadata.block_table_tensor"),
    Seam(READ, "vllm.v1.attention.backend", "CommonAttentionMetadata.seq_lens"),
    Seam(READ, "vllm.v1.attention.backend", "CommonAttentionMetadata.query_start_loc"),
    Seam(
        READ,
        _RUNNER,
        "GPUModelRunner._build_attention_metadata",
        ("positions=self.positions[:num_tokens_padded]",),
    ),
    Seam(
        READ,
        _RUNNER,
        "GPUModelRunner.execute_model",
        ("self._build_attention_metadata(", "self._preprocess("),
    ),
    Seam(READ, _RUNNER, "GPUModelRunner.shared_kv_cache_layers"),
    Seam(READ, _RUNNER, "GPUModelRunner.attn_groups"),
    Seam(
        READ,
        "vllm.v1.worker.block_table",
        "BlockTable.compute_slot_mapping",
        ("if self.slot_mapping_mode == SlotMappingMode.NONE",),
    ),
    Seam(READ, "vllm.v1.worker.block_table", "MultiGroupBlockTable.block_tables"),
    Seam(CALLED, "vllm.v1.worker.utils", "AttentionGroup.get_metadata_builder"),
    Seam(READ, "vllm.v1.worker.gpu_input_batch", "InputBatch"),
    Seam(READ, "vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
    Seam(READ, "vllm.v1.worker.gpu.block_table", "BlockTables"),
    Seam(READ, "vllm.v1.worker.gpu.block_table", "BlockTables.slot_mapping_enabled"),
    Seam(READ, "vllm.v1.worker.gpu.model_runner", "GPUModelRunner.model_state"),
    Seam(
        CALLED,
        "vllm.model_executor.layers.rotary_embedding.base",
        "RotaryEmbeddingBase._compute_inv_freq",
    ),
    Seam(
        CALLED,
        "vllm.model_executor.layers.rotary_embedding.base",
        "RotaryEmbeddingBase._compute_cos_sin_cache",
    ),
    Seam(READ, "vllm.model_executor.layers.rotary_embedding", "Llama3RotaryEmbedding"),
    Seam(READ, "vllm.model_executor.layers.rotary_embedding", "YaRNScalingRotaryEmbedding"),
    Seam(READ, "vllm.model_executor.layers.rotary_embedding", "LinearScalingRotaryEmbedding"),
    *(
        Seam(READ, f"vllm.model_executor.models.{module}", name, ("self.rotary_emb",))
        for module, name in (
            ("llama", "LlamaAttention"),
            ("mistral", "MistralAttention"),
            ("qwen2", "Qwen2Attention"),
            ("qwen3", "Qwen3Attention"),
        )
    ),
    # --- configuration that is read
    *(
        Seam(READ, f"vllm.config.{module}", f"{owner}.{name}")
        for module, owner, names in (
            (
                "vllm",
                "VllmConfig",
                "additional_config use_v2_model_runner kv_transfer_config speculative_config",
            ),
            ("scheduler", "SchedulerConfig", "scheduler_cls async_scheduling max_num_seqs"),
            (
                "parallel",
                "ParallelConfig",
                "worker_cls decode_context_parallel_size prefill_context_parallel_size "
                "data_parallel_size use_ubatching",
            ),
            ("attention", "AttentionConfig", "backend backend_per_kind"),
            ("cache", "CacheConfig", "cache_dtype kv_sharing_fast_prefill DEFAULT_BLOCK_SIZE"),
            (
                "model",
                "ModelConfig",
                "use_mla is_encoder_decoder runner_type is_attention_free is_hybrid is_moe "
                "is_mm_prefix_lm uses_alibi uses_mrope get_sliding_window logits_processors",
            ),
        )
        for name in names.split()
    ),
)
