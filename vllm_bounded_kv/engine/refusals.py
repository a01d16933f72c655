"""What the plugin refuses at start-up, and why. Nothing is silently ignored or clamped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_bounded_kv.engine import rope
from vllm_bounded_kv.engine.policy import ABSOLUTE, EnginePolicy, PolicyError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class UnsupportedError(ValueError):
    """The engine is configured with something that the bounded cache cannot serve."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"--kv-plugin bounded does not support {what}. {remedy}")


def check_model(model: ModelConfig) -> None:
    """Refuse models of kinds that the bounded cache cannot serve.

    Raises:
        UnsupportedError: naming the kind.
    """
    for is_used, what in (
        (model.use_mla, "multi-head latent attention (MLA)"),
        (model.is_encoder_decoder, "encoder-decoder models"),
        (model.runner_type != "generate", f"--runner {model.runner_type}"),
        (model.is_attention_free, "models without attention"),
        (model.is_hybrid, "hybrid models with recurrent layers"),
        (model.is_mm_prefix_lm, "models that attend images bidirectionally"),
    ):
        if is_used:
            raise UnsupportedError(what, "Serve this model without --kv-plugin.")


def check_engine(config: VllmConfig, policy: EnginePolicy) -> None:
    """Refuse engine configurations that the bounded cache cannot serve.

    Layer-level refusals (ALiBi, soft caps, sliding-window layers, ...) are raised when the model's
    layers are built: only they know.

    Raises:
        UnsupportedError: naming the flag or feature.
        PolicyError: naming the field, its value and the limit.
    """
    from vllm.config import CompilationMode

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    speculative = config.speculative_config
    check_model(model)
    for is_used, what, remedy in (
        (
            speculative is not None and speculative.method != "ngram",
            f"speculative decoding by {getattr(speculative, 'method', None)} "
            "(--speculative-config)",
            'Its "method" can be "ngram".',
        ),
        (
            speculative is not None and config.scheduler_config.async_scheduling,
            "speculative decoding with asynchronous scheduling yet",
            "Use --no-async-scheduling.",
        ),
        (
            speculative is not None and parallel.pipeline_parallel_size > 1,
            "speculative decoding with --pipeline-parallel-size yet",
            "Remove one of the two.",
        ),
        (
            config.kv_transfer_config is not None,
            "KV connectors and offloading (--kv-transfer-config, --kv-offloading-size)",
            "Remove the flag.",
        ),
        (
            cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
            f"a quantised KV cache, or one of another dtype than the model's {model.dtype} "
            f"(--kv-cache-dtype {cache.cache_dtype})",
            "Use --kv-cache-dtype auto.",
        ),
        (
            parallel.decode_context_parallel_size > 1,
            f"--decode-context-parallel-size {parallel.decode_context_parallel_size}",
            "Use 1.",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            f"--prefill-context-parallel-size {parallel.prefill_context_parallel_size}",
            "Use 1.",
        ),
        (
            parallel.data_parallel_size > 1 and model.is_moe,
            f"--data-parallel-size {parallel.data_parallel_size} with mixture-of-experts models "
            "yet",
            "Run one server a replica.",
        ),
        (
            parallel.pipeline_parallel_size > 1
            and config.compilation_config.mode == CompilationMode.NONE,
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size} with --enforce-eager (nor "
            "does vLLM's CPU runner: its stages prepare what they receive as they compile)",
            "Remove --enforce-eager, or use --tensor-parallel-size.",
        ),
        (
            cache.kv_sharing_fast_prefill,
            "cross-layer KV sharing (--kv-sharing-fast-prefill)",
            "Remove the flag.",
        ),
        *_on_device(config),
    ):
        if is_used:
            raise UnsupportedError(what, remedy)
    check_positions(config, policy)


def _on_device(config: VllmConfig) -> list[tuple[bool, str, str]]:
    """What the device's backend does not do: whether it is asked for, what, and the remedy."""
    device = config.device_config.device_type
    if device == "cpu":
        return [
            (
                config.use_v2_model_runner,
                "vLLM's V2 model runner on CPUs",
                "Set VLLM_USE_V2_MODEL_RUNNER=0.",
            )
        ]
    backend = config.attention_config.backend
    return [
        (
            device != "cuda" or torch.version.hip is not None,
            f"device {device!r}{' of ROCm' if torch.version.hip else ''}",
            "Use a CPU or a CUDA GPU.",
        ),
        (
            not config.use_v2_model_runner,
            "vLLM's V1 model runner on GPUs",
            "Unset VLLM_USE_V2_MODEL_RUNNER, or see in vLLM's log why it chose V1.",
        ),
        (
            backend is not None or bool(config.attention_config.backend_per_kind),
            f"another attention backend ({getattr(backend, 'name', backend)}): it brings its own",
            "Remove --attention-backend; where the model's own settings ask for it, serve it "
            "without --kv-plugin.",
        ),
        (
            config.speculative_config is not None,
            "speculative decoding on GPUs yet",
            "Remove --speculative-config.",
        ),
        (
            # A session's turn that has ended is run one token too far, which then turns keys.
            bool(config.scheduler_config.async_scheduling),
            "asynchronous scheduling on GPUs yet",
            "Use --no-async-scheduling.",
        ),
        (
            config.parallel_config.use_ubatching,
            "microbatches (--enable-dbo, --ubatch-size)",
            "Remove the flag.",
        ),
    ]


def check_layer(
    *,
    alibi_slopes: bool,
    logits_soft_cap: bool,
    sinks: bool,
    sliding_window: bool,
    kv_sharing: bool,
    attn_type: str,
    others: Sequence[str] = (),
) -> None:
    """Refuse an attention layer with features that the kernels do not have.

    Raises:
        ValueError: naming the feature.
    """
    for feature, is_used in (
        ("ALiBi slopes", alibi_slopes),
        ("a logits soft cap", logits_soft_cap),
        ("learned attention sinks", sinks),
        ("sliding-window layers", sliding_window),
        ("cross-layer KV sharing", kv_sharing),
        (f"attention type {attn_type}", attn_type != "decoder"),
        (", ".join(others), bool(others)),
    ):
        if is_used:
            raise ValueError(
                f"--kv-plugin bounded does not support this model: it uses {feature}. "
                "Serve it without --kv-plugin."
            )


def check_declared_layers(model: ModelConfig) -> None:
    """Refuse what `check_layer` would, as far as the model's configuration tells.

    Raises:
        ValueError: naming the feature.
    """
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    is_sliding = "sliding_attention" in kinds
    if kinds <= {"sliding_attention"}:  # then vLLM gives every layer the model's window, if any
        is_sliding = model.get_sliding_window() is not None
    others = kinds - {"attention", "full_attention", "sliding_attention"}
    check_layer(
        alibi_slopes=bool(model.uses_alibi),
        logits_soft_cap=bool(getattr(text, "attn_logit_softcapping", None)),
        sinks=False,  # no configuration says so
        sliding_window=is_sliding,
        kv_sharing=bool(getattr(text, "num_kv_shared_layers", 0)),
        attn_type="decoder",
        others=[f"layers of type {kind}" for kind in sorted(others)],
    )


def check_positions(config: VllmConfig, policy: EnginePolicy) -> None:
    """Refuse streams longer than the positions that the model knows.

    vLLM lets VLLM_ALLOW_LONG_MAX_MODEL_LEN lift this limit; the CPU rotary kernel then reads
    beyond its table without saying so.
    """
    model = config.model_config
    if policy.positions != ABSOLUTE:
        return
    table = rope.table_length(model)
    if table is not None and model.max_model_len > table:
        why_not, capacity = rope.why_not_rebase(model), policy.largest.capacity
        remedy = ", or rebase"
        if why_not:
            remedy = f" (rebase does not serve this model: {why_not})"
        elif capacity >= table:
            remedy = f", or lower sink + window={capacity} below that, for rebase"
        raise PolicyError(
            "--max-model-len",
            model.max_model_len,
            f"is beyond the model's {table} rotary positions (max_position_embeddings), which "
            f"--bounded-kv-positions absolute cannot exceed; use at most {table}{remedy}",
        )
    model.get_and_verify_max_len(model.max_model_len)
