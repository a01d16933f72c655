"""The language model: a plain Llama, small enough to run beside other work on a core.

It is trained with what it is served with: the sink is a voice's sample, the window holds the
running sentence and some of the last.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig

from bounded_kv_speech import fsq
from bounded_kv_speech.tokens import (
    END,
    FIRST_CODE,
    FIRST_PHONE,
    PAD,
    PHONES,
    SPEECH,
    TEXT,
    VOCAB_SIZE,
    VOICE,
)

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 6, 6, 3, 32
SINK, WINDOW = 96, 512
"""Entries of the cache: a voice's, and of what was said last."""
POSITION_LIMIT = 4 * (SINK + WINDOW)
"""Positions go round below it, as vLLM's `--bounded-kv-position-limit` has it by default."""


def llama_config() -> LlamaConfig:
    """About 4 million weights, of which 1.6 are the embeddings, used twice.

    Says how its cache is to be bounded, for `--kv-plugin bounded`, and how its tokens become sound,
    for the speech server.
    """
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITION_LIMIT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    config.update({"bounded_kv": {"sink": SINK, "window": WINDOW, "max_source_len": SINK}})
    config.update({"bounded_kv_speech": {"profile": "embedded"}})
    return config


def code_properties() -> Tensor:
    """Of each code, one-hot, its level in each dimension of the grid and in each pair: `[C, P]`."""
    points = fsq.to_points(torch.arange(fsq.NUM_CODES))
    levels = [
        torch.nn.functional.one_hot(points[:, i].unique(return_inverse=True)[1]).float()
        for i in range(len(fsq.LEVELS))
    ]
    pairs = [
        (a[:, :, None] * b[:, None]).flatten(1)
        for i, a in enumerate(levels)
        for b in levels[i + 1 :]
    ]
    return torch.cat([*levels, *pairs], dim=1)


def token_names() -> list[str]:
    """Of all tokens, in their order: what a text of them is written in, with spaces between."""
    names = [f"<{i}>" for i in range(FIRST_CODE)]
    named = {PAD: "pad", VOICE: "voice", TEXT: "text", SPEECH: "speech", END: "end"}
    for token, name in named.items():
        names[token] = f"<{name}>"
    for i, phone in enumerate(PHONES):
        names[FIRST_PHONE + i] = "<space>" if phone == " " else phone
    return names + [f"c{code}" for code in range(fsq.NUM_CODES)]


def export(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write a folder that vLLM and `transformers` load as any Llama's, in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config()
    config.dtype = "float16"
    config.save_pretrained(folder)
    half = {name: value.half().contiguous() for name, value in weights.items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    vocabulary = {name: i for i, name in enumerate(token_names())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<end>",
                "pad_token": "<pad>",
                "clean_up_tokenization_spaces": False,
            },
            indent=2,
        )
        + "\n",
        encoding="utf-8",
    )
