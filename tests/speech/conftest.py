"""Servers and engines of the embedded voice; its weights are the repository's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.voice_server import serving_voice
from vllm_bounded_kv.launch import VllmServer


@pytest.fixture(scope="session", autouse=True)
def stock_plugins() -> Iterator[None]:
    """What the environment says of vLLM's plugins is not heeded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_PLUGINS", raising=False)
        yield


@pytest.fixture(scope="session")
def server(stock_plugins: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One server of the embedded voice, for all tests that talk to one."""
    with serving_voice(tmp_path_factory.mktemp("voices")) as server:
        yield server
