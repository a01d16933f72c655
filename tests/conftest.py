"""Settings that every test shares. Nothing here may reach a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.fire import Scale
    from support.oracle_llama import OracleLlama

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Engine tests look inside the engine; tests of whole servers start processes of their own.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


# Imports within: the settings above come first.


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks.tiny_llama import cached_tiny_llama

    return cached_tiny_llama(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> OracleLlama:
    from support.oracle_llama import OracleLlama

    return OracleLlama.from_folder(tiny_model)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torture", action="store_true", help="what is done under fire, in full")


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Scale:
    """How much is done to servers under fire."""
    from support.fire import LONG, SHORT

    return LONG if request.config.getoption("--torture") else SHORT
