"""What of vLLM the plugin replaces in a process, for tests that put it back."""

from __future__ import annotations

from typing import Any

LORA_OPS = ("shrink", "expand", "expand_slice")


def patched_globals() -> list[tuple[Any, str]]:
    """Every global that registration, or a bounded engine in this process, mutates."""
    import vllm.plugins
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
    from vllm.v1.engine.input_processor import InputProcessor

    return [
        (EngineArgs, "add_cli_args"),
        (EngineArgs, "create_engine_config"),
        (InputProcessor, "process_inputs"),
        (AsyncLLM, "generate"),
        (AsyncLLM, "_add_streaming_input_request"),
        (EngineCore, "preprocess_add_request"),
        (EngineCore, "bounded_kv_figures"),
        (EngineCore, "bounded_kv_sources"),
        (SpinCondition, "record_read"),
        (BaseIncrementalDetokenizer, "get_next_output_text"),
        (vllm.plugins, "load_endpoint_plugins"),
        *((owner, f"bgmv_{name}") for owner in (lora_ops, punica_cpu) for name in LORA_OPS),
    ]
