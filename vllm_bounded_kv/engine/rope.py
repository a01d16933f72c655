"""Which models' rotary positions can fall back, and how their keys turn.

Falling back needs to know that every attention layer rotates its keys by its position, all alike,
and that nothing else in the model looks at positions. vLLM does not say so of a model, so the
architectures are those whose code has been read (vllm/model_executor/models, 0.32.0).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from vllm_bounded_kv.engine.policy import REBASE, PolicyError
from vllm_bounded_kv.engine.rotary import Rotary

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
ROPE_TYPES = ("default", "llama3", "linear", "yarn")
TABLE_TOLERANCE = 2e-2
"""Between a rotary table and its frequencies: vLLM rounds angles to float32, which is 8e-3 at
position 131,072."""


def max_positions(model_config: Any) -> int | None:
    """Positions that the model knows: its `max_position_embeddings`, as far as its table goes."""
    text = model_config.hf_text_config
    count: int | None = getattr(text, "max_position_embeddings", None)
    rope = _rope_parameters(text)
    original = rope.get("original_max_position_embeddings")
    if count is not None and original and rope.get("rope_type") == "yarn":
        return min(count, int(original * rope.get("factor", 1.0)))
    return count


def table_length(model_config: Any) -> int | None:
    """Rows of the model's rotary table: linear scaling stretches `max_position_embeddings`."""
    count = max_positions(model_config)
    rope = _rope_parameters(model_config.hf_text_config)
    if count is not None and rope.get("rope_type") == "linear":
        return int(count * rope.get("factor", 1.0))
    return count


def _rope_parameters(text: Any) -> dict[str, Any]:
    return getattr(text, "rope_parameters", None) or {}


def why_not_rebase(model_config: Any) -> str | None:
    """Why this model's positions cannot fall back; `None` when they can.

    Args:
        model_config: vLLM's `ModelConfig`.
    """
    text = model_config.hf_text_config
    rope = _rope_parameters(text)
    rope_type = rope.get("rope_type", "default")
    unknown = [a for a in model_config.architectures if a not in ARCHITECTURES]
    if model_config.model_impl not in ("auto", "vllm"):
        return f"--model-impl {model_config.model_impl} hides its rotary embedding"
    if model_config.use_mla:
        return "multi-head latent attention (MLA) keeps no rotated keys"
    if model_config.uses_mrope:
        return "M-RoPE counts positions along several axes"
    if model_config.uses_alibi:
        return "ALiBi has no rotary positions"
    if unknown:
        return f"it is known to be right for {', '.join(ARCHITECTURES)}, not {', '.join(unknown)}"
    if any(isinstance(value, dict) for value in rope.values()):
        return "its layers have rotary embeddings of several kinds"
    if rope_type not in ROPE_TYPES:
        return f"rope_type {rope_type!r} is none of {', '.join(ROPE_TYPES)}"
    if getattr(text, "llama_4_scaling", None):
        return "llama_4_scaling scales queries by their position"
    if getattr(text, "dual_chunk_attention_config", None):
        return "dual chunk attention rotates by chunk"
    if max_positions(model_config) is None:
        return "it has no max_position_embeddings"
    return None


def rotary_of(model: torch.nn.Module, layer_names: Iterable[str], limit: int) -> Rotary:
    """The rotary embedding that the attention layers share.

    Args:
        model: as vLLM loaded it.
        layer_names: of its attention layers; each one's parent owns a `rotary_emb`.
        limit: largest number of positions that will be asked for.

    Raises:
        PolicyError: when they do not share one of a known kind whose table holds `limit` rows.
    """
    embeddings: dict[int, Any] = {}
    for name in layer_names:
        parent = model.get_submodule(name.rpartition(".")[0])
        embedding = getattr(parent, "rotary_emb", None)
        embeddings[id(embedding)] = embedding
    if len(embeddings) != 1:
        raise _refusal(f"its layers use {len(embeddings)} rotary embeddings")
    (embedding,) = embeddings.values()
    table = getattr(embedding, "cos_sin_cache", torch.empty(0))
    with table.device:  # another device's powers and sines have other last bits
        frequencies = _frequencies(embedding)
        if len(table) < limit:
            raise _refusal(f"its rotary table has {len(table)} rows, not {limit}")
        exact = embedding._compute_cos_sin_cache()[:limit]
    # The table in use is rounded to the model's dtype.
    is_right = torch.equal(table[:limit], exact.to(table.dtype))
    if not is_right or not _is_table_of(exact, frequencies):
        raise _refusal("its rotary table is not what its frequencies give")
    return Rotary(frequencies, bool(embedding.is_neox_style))


def _is_table_of(table: torch.Tensor, frequencies: Any) -> bool:
    """Whether `[rows, 2 * n]` cosines and sines, at any magnitude, turn by `n` frequencies."""
    for row in (1, len(table) - 1):
        cos, sin = table[row].double().cpu().numpy().reshape(2, -1)
        turned = (cos + 1j * sin) / np.hypot(cos, sin)
        if np.abs(turned - np.exp(1j * row * frequencies)).max() > TABLE_TOLERANCE:
            return False
    return True


def _frequencies(embedding: Any) -> Any:
    """Radians a position; the classes are vLLM's, told apart by their exact names."""
    kind = type(embedding).__name__
    if embedding is None:
        raise _refusal("its attention layers have no rotary_emb beside them")
    if kind in ("RotaryEmbedding", "Llama3RotaryEmbedding"):
        frequencies = embedding._compute_inv_freq(embedding.base)
    elif kind == "YaRNScalingRotaryEmbedding":
        frequencies = embedding._compute_inv_freq(embedding.scaling_factor)
    elif kind == "LinearScalingRotaryEmbedding" and len(embedding.scaling_factors) == 1:
        frequencies = embedding._compute_inv_freq(embedding.base) / embedding.scaling_factors[0]
    else:
        raise _refusal(f"its rotary embedding is a {kind}")
    return frequencies.double().cpu().numpy()


def _refusal(reason: str) -> PolicyError:
    return PolicyError(
        "--bounded-kv-positions",
        REBASE,
        f"not for this model: {reason}; use --bounded-kv-positions absolute",
    )
