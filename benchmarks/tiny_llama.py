"""A tiny random Llama folder that any loader of Hugging Face checkpoints can read.

Contract: the same settings write the same tensors, always. The weights are random but scaled so
that what is attended decides what is said: scores are peaked, the attention branch outweighs the
residual it is added to, and greedy output neither loops at once nor hides a missing key.

For the tests, and for the soak, which needs a vocabulary with ids that are not all small.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

NUM_BYTES = 256
SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|start|>",
    "<|end|>",
    "<|x0|>",
    "<|x1|>",
    "<|x2|>",
)
BOS_ID, EOS_ID, PAD_ID = NUM_BYTES, NUM_BYTES + 1, NUM_BYTES + 2
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
PRINTABLE = range(32, 127)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyLlama:
    """Settings of a tiny model; equal settings give equal files.

    The four scales are standard deviations for inputs of unit variance: of an attention score, of
    the attention and MLP branches against an embedding of 1, and of a logit.
    """

    num_layers: int = 3
    hidden_size: int = 128
    intermediate_size: int = 192
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 8192
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, Any], ...] = (("rope_type", "default"),)
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    seed: int = 0
    num_words: int = 0
    """Tokens after the bytes and special tokens, of several characters each, as real vocabularies
    have them. With words, the model says nothing else, so every id it says is above 256."""
    score_scale: float = 2.5
    attention_scale: float = 2.0
    mlp_scale: float = 0.5
    logit_scale: float = 4.0

    @property
    def vocab_size(self) -> int:
        """Bytes, special tokens and words."""
        return VOCAB_SIZE + self.num_words

    @property
    def said(self) -> range:
        """The ids of which the model's output, and every random prompt, is made."""
        return range(VOCAB_SIZE, self.vocab_size) if self.num_words else PRINTABLE

    def hf_config(self) -> dict[str, Any]:
        """The contents of `config.json`, in the form that transformers 5 writes."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": BOS_ID,
            "dtype": "float32",
            "eos_token_id": EOS_ID,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_bias": False,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "pad_token_id": PAD_ID,
            "pretraining_tp": 1,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, **dict(self.rope_scaling)},
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """`length` token ids of random printable bytes, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(PRINTABLE.start, PRINTABLE.stop, (length,), generator=generator)
    return [int(i) for i in ids]


def tiny_weights(spec: TinyLlama) -> dict[str, torch.Tensor]:
    """Checkpoint tensors by name, float32; every matrix is `[out_features, in_features]`."""
    generator = torch.Generator().manual_seed(spec.seed)

    def matrix(out_features: int, in_features: int, scale: float) -> torch.Tensor:
        values = torch.randn(out_features, in_features, generator=generator)
        return values * (scale / math.sqrt(in_features))

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(spec.hidden_size, generator=generator)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qk_scale = math.sqrt(spec.score_scale)
    weights = {"model.embed_tokens.weight": matrix(spec.vocab_size, hidden, math.sqrt(hidden))}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": norm(),
            prefix + "self_attn.q_proj.weight": matrix(q_size, hidden, qk_scale),
            prefix + "self_attn.k_proj.weight": matrix(kv_size, hidden, qk_scale),
            prefix + "self_attn.v_proj.weight": matrix(kv_size, hidden, 1.0),
            prefix + "self_attn.o_proj.weight": matrix(hidden, q_size, spec.attention_scale),
            prefix + "post_attention_layernorm.weight": norm(),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden, 1.0),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden, 1.0),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner, 2 * spec.mlp_scale),
        }
    weights["model.norm.weight"] = norm()
    if not spec.tie_word_embeddings:
        head = matrix(spec.vocab_size, hidden, spec.logit_scale)
        # Output stays printable text, and never the end of it: other tokens' logits stay near 0.
        quiet = torch.ones(spec.vocab_size, 1, dtype=torch.bool)
        quiet[spec.said.start : spec.said.stop] = False
        weights["lm_head.weight"] = torch.where(quiet, 0.1 * head, head)
    return weights


def byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte value."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(NUM_BYTES) if byte not in visible]
    return [
        chr(byte if byte in visible else NUM_BYTES + hidden.index(byte))
        for byte in range(NUM_BYTES)
    ]


def word(number: int) -> str:
    """A word of four letters, the same for the same number below 26^4, with a space before it."""
    letters = [chr(ord("a") + number // 26**place % 26) for place in range(4)]
    return " " + "".join(letters)


def tiny_tokenizer(num_words: int = 0) -> Tokenizer:
    """One token per byte, its id the byte's value, then the special tokens, then the words.

    Text is always encoded byte by byte; words only come out of the model.
    """
    characters = byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    # New tokens would be given the next ids after all others: these must be there already.
    vocab |= {token: NUM_BYTES + i for i, token in enumerate(SPECIAL_TOKENS)}
    for i in range(num_words):
        vocab["".join(characters[byte] for byte in word(i).encode())] = VOCAB_SIZE + i
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tiny_llama(folder: Path, spec: TinyLlama = TinyLlama()) -> Path:
    """Write config, weights and tokenizer into `folder`, which is made if absent; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tiny_weights(spec), folder / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer(spec.num_words).save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "pad_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(spec.hf_config(), indent=2) + "\n")
    return folder


def cached_tiny_llama(root: Path, spec: TinyLlama = TinyLlama()) -> Path:
    """The folder of this model under `root`, written on first use.

    The folder appears whole, by a rename, so processes that share `root` cannot see a half.
    """
    key = hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode()).hexdigest()[:12]
    folder = root / f"tiny-llama-{key}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".tiny-llama-", dir=root))
    write_tiny_llama(partial, spec)
    try:
        os.rename(partial, folder)
    except OSError:
        shutil.rmtree(partial)
        if not folder.exists():
            raise
    return folder
