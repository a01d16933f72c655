"""Servers and engines of the embedded voice; its weights are the repository's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def stock_plugins() -> Iterator[None]:
    """What the environment says of vLLM's plugins is not heeded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_PLUGINS", raising=False)
        yield
