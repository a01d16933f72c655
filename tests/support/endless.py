"""The server whose streams outlive the model's positions, and whose sources can be pinned."""

from __future__ import annotations

from support.server import BLOCK_SIZE, tiny_server_flags

SINK, WINDOW, MAX_SOURCE, SLOTS = 5, 96, 96, 4
MAX_LEN = 20_000
"""Tokens that a stream may have: more than the model's 8,192 positions."""
LIMIT = 4 * (MAX_SOURCE + WINDOW)
"""Where positions fall back, by default."""
MAX_PINNED = 128
"""Blocks that sources may hold."""


def server_flags() -> list[str]:
    slot_blocks = -(-(MAX_SOURCE + WINDOW) // BLOCK_SIZE)
    return [
        *tiny_server_flags(SLOTS * slot_blocks + MAX_PINNED),
        *("--kv-plugin", "bounded", "--max-model-len", str(MAX_LEN)),
        *("--bounded-kv-sink", str(SINK), "--bounded-kv-window", str(WINDOW)),
        *("--bounded-kv-max-source-len", str(MAX_SOURCE), "--bounded-kv-max-slots", str(SLOTS)),
        *("--bounded-kv-max-pinned-blocks", str(MAX_PINNED)),
        *("--max-num-seqs", "8", "--api-server-count", "1", "--enable-prompt-tokens-details"),
    ]
