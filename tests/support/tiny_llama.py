"""The tiny model, which lives with the benchmarks because one of them serves it too."""

from benchmarks.tiny_llama import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    PRINTABLE,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    TinyLlama,
    byte_characters,
    cached_tiny_llama,
    random_prompt,
    tiny_tokenizer,
    tiny_weights,
    write_tiny_llama,
)

__all__ = [
    "BOS_ID",
    "CHAT_TEMPLATE",
    "EOS_ID",
    "PRINTABLE",
    "SPECIAL_TOKENS",
    "VOCAB_SIZE",
    "TinyLlama",
    "byte_characters",
    "cached_tiny_llama",
    "random_prompt",
    "tiny_tokenizer",
    "tiny_weights",
    "write_tiny_llama",
]
