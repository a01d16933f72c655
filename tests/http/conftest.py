"""The tiny model behind one `vllm serve --kv-plugin bounded` that most of this tier shares, and
behind another whose streams outlive the model's positions and whose sources can be pinned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import endless
from support.server import MAX_POSITIONS, serving, tiny_server_flags, wait_until_idle
from vllm_bounded_kv.launch import VllmServer

SINK, WINDOW, MAX_SOURCE = 5, 96, 96
SLOTS = 4
POOL_BLOCKS = 39
"""Room for six slots of the largest size, six blocks each, and three blocks: `SLOTS` is less."""


@pytest.fixture(scope="session", autouse=True)
def logging_servers() -> Iterator[None]:
    """The servers print their start-up line; the tests' own setting would hide it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        patch.delenv("VLLM_PLUGINS", raising=False)
        yield


@pytest.fixture(scope="session")
def shared_server(tiny_model: Path) -> Iterator[VllmServer]:
    flags = [
        *tiny_server_flags(POOL_BLOCKS),
        *("--hf-overrides", json.dumps({"max_position_embeddings": MAX_POSITIONS})),
        *("--kv-plugin", "bounded", "--bounded-kv-positions", "absolute"),
        *("--bounded-kv-sink", str(SINK), "--bounded-kv-window", str(WINDOW)),
        *("--bounded-kv-max-source-len", str(MAX_SOURCE), "--bounded-kv-max-slots", str(SLOTS)),
        *("--max-num-seqs", "8", "--api-server-count", "1", "--enable-prompt-tokens-details"),
    ]
    with serving(tiny_model, flags) as server:
        yield server


@pytest.fixture(scope="session")
def endless_server(tiny_model: Path) -> Iterator[VllmServer]:
    # Development mode is what brings vLLM's /reset_prefix_cache.
    with serving(tiny_model, endless.server_flags(), {"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server


@pytest.fixture
def server(shared_server: VllmServer) -> Iterator[VllmServer]:
    """The shared server; afterwards every block is back, and it is still alive."""
    yield shared_server
    wait_until_idle(shared_server.url)


@pytest.fixture
def url(server: VllmServer) -> str:
    return server.url
