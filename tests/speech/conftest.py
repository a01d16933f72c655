"""Servers and engines of the embedded voice; its weights are the repository's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bounded_kv_speech.package import BUILT_IN


@pytest.fixture(scope="session", autouse=True)
def stock_plugins() -> Iterator[None]:
    """What the environment says of vLLM's plugins is not heeded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_PLUGINS", raising=False)
        yield


collect_ignore_glob = [] if (BUILT_IN / "SHA256SUMS").exists() else ["test_*.py"]
"""There are no weights to test yet."""
