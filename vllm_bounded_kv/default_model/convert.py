"""A Llama GGUF, dequantised into the folder that `transformers` and vLLM load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of special tokens."""

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GLOBAL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def convert(path: Path, folder: Path) -> None:
    """Write config, weights (float32), tokenizer and chat template into `folder`.

    Args:
        path: a GGUF of architecture `llama` with a byte-level BPE tokenizer.
        folder: exists, and is empty.

    Raises:
        ValueError: for another architecture or tokenizer.
    """
    reader = gguf.GGUFReader(path)
    meta: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    for key, expected in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if meta[key] != expected:
            raise ValueError(f"{path.name}: {key} is {meta[key]!r}, not {expected!r}")
    weights = _weights(reader, meta)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", _config(meta, tied="lm_head.weight" not in weights))
    token_ids = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    _write(folder / "generation_config.json", token_ids)
    _tokenizer(meta).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(meta))


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": 1e-5
        if np.isclose(meta["llama.attention.layer_norm_rms_epsilon"], 1e-5)
        else meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _weights(reader: gguf.GGUFReader, meta: dict[str, Any]) -> dict[str, torch.Tensor]:
    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in tqdm(reader.tensors, desc="dequantising", unit="tensor"):
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *_, part, _ = tensor.name.split(".")
        if part in heads:
            array = unpermute(array, heads[part])
        weights[_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(array))
    return weights


def _name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    return f"{GLOBAL_TENSORS[parts[0]]}.{parts[1]}"


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's reordering of query and key rows, which pairs rotary dimensions next to
    each other; Hugging Face's rotary embedding pairs the two halves of a head.

    Args:
        weight: `[num_heads * head_dim, in_features]`.
        num_heads: of queries, or of keys.
    """
    rows, columns = weight.shape
    half = rows // num_heads // 2
    paired = weight.reshape(num_heads, half, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """SmolLM's byte-level BPE: digits one by one, then GPT-2's split."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token
        for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
        if kind == CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }
