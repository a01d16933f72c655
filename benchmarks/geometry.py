"""What a model's configuration says about sizes."""

from __future__ import annotations

from typing import Any


def _config(model: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model)


def kv_bytes_per_token(model: str) -> int:
    """Bytes of one token's keys and values in all layers, in float32."""
    config = _config(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_layer: int = 2 * config.num_key_value_heads * head_dim * 4
    return per_layer * config.num_hidden_layers


def max_positions(model: str) -> int:
    """Rotary positions that the model was trained on."""
    positions: int = _config(model).max_position_embeddings
    return positions


def vocab_size(model: str) -> int:
    """Number of token ids."""
    size: int = _config(model).vocab_size
    return size
