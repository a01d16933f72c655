"""What vLLM is told on GPUs, as far as that can be seen without one."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_bounded_kv.engine import compat
from vllm_bounded_kv.engine.gpu_backend import BoundedGPUAttentionBackend, BoundedGPUAttentionImpl
from vllm_bounded_kv.engine.policy import EnginePolicy
from vllm_bounded_kv.engine.spec import BoundedAttentionSpec


def test_a_config_on_a_gpu_names_worker_and_backend(
    plugin: None, engine_args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_bounded_kv.engine.gpu_worker import BoundedGPUWorker
    from vllm_bounded_kv.engine.plugin import _activate

    config = engine_args(max_model_len=512).create_engine_config()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config.additional_config = {"kv_plugin": "bounded", "bounded_kv": {"window": 60}}
    config.device_config.device_type = "cuda"
    config.scheduler_config.async_scheduling = False
    _activate(config)
    worker_cls = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    assert worker_cls is BoundedGPUWorker
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM


def test_a_gpu_schedules_in_step_unless_told_otherwise(
    plugin: None, engine_args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    from vllm_bounded_kv.engine.plugin import _before_config

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    args = engine_args({})
    undo = _before_config(args)
    assert args.async_scheduling is False
    undo()
    assert args.async_scheduling is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_size", "fits"), [(64, True), (128, True), (8, False), (512, False)])
def test_vllm_takes_the_backend_for_what_its_kernels_serve(
    dtype: torch.dtype, head_size: int, fits: bool
) -> None:
    reasons = BoundedGPUAttentionBackend.validate_configuration(
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype="auto",
        block_size=16,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=DeviceCapability(9, 0),
        attn_type="decoder",
    )
    assert reasons == ([] if fits else ["head_size not supported"])


def test_slots_are_mapped_by_the_builder_in_any_graph() -> None:
    builder_cls = BoundedGPUAttentionBackend.get_builder_cls()
    spec: Any = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16)
    BoundedGPUAttentionBackend.policy = EnginePolicy(sink=4, window=60)
    try:
        bounded = BoundedGPUAttentionBackend.customize_spec(spec)
    finally:
        BoundedGPUAttentionBackend.policy = None
    assert isinstance(bounded, BoundedAttentionSpec)
    assert not bounded.uses_slot_mapping
    assert builder_cls.get_cudagraph_support(None, bounded) is AttentionCGSupport.ALWAYS  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi slopes"),
        ({"sliding_window": 9}, "sliding-window layers"),
        ({"logits_soft_cap": 30.0}, "a logits soft cap"),
        ({"sinks": torch.zeros(4)}, "learned attention sinks"),
        ({"attn_type": "encoder"}, "attention type encoder"),
        ({"kv_sharing_target_layer_name": "other"}, "cross-layer KV sharing"),
        ({"chunk_lookback": 3}, "chunk_lookback"),
    ],
)
def test_layers_with_more_are_refused(options: dict[str, Any], feature: str) -> None:
    BoundedGPUAttentionImpl(4, 32, 1.0, 2, use_alibi_sqrt=False, chunk_lookback=-1)
    with pytest.raises(ValueError, match=f"it uses {feature}. Serve it without"):
        BoundedGPUAttentionImpl(4, 32, 1.0, 2, **options)


def test_the_model_gets_positions_of_its_own_at_one_address() -> None:
    own = {"inputs_embeds": 5, "positions": "the runner's"}
    state = SimpleNamespace(
        prepare_inputs=lambda batch, states: own, prepare_dummy_inputs=lambda rows, tokens: {}
    )
    positions = torch.arange(8)
    compat.give_positions(state, positions)
    given = state.prepare_inputs(SimpleNamespace(num_tokens_after_padding=3), None)
    assert given["inputs_embeds"] == 5 and given["positions"].tolist() == [0, 1, 2]
    dummy = state.prepare_dummy_inputs(2, 5)
    assert dummy["positions"].tolist() == [0, 1, 2, 3, 4]
    assert dummy["positions"].data_ptr() == given["positions"].data_ptr() == positions.data_ptr()
    assert own["positions"] == "the runner's"


def test_the_gpu_worker_leaves_torch_alone() -> None:
    """vLLM's CPU worker replaces CUDA's streams and events in the process that imports it."""
    program = (
        "import sys, vllm_bounded_kv.engine.gpu_worker\n"
        "assert 'vllm.v1.worker.gpu_worker' in sys.modules\n"
        "found = [name for name in sys.modules if name.startswith('vllm.v1.worker.cpu')]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
