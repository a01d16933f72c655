"""One engine shared by the tests of a file: a request brings its policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engine import Engine

SINK, WINDOW, MAX_SOURCE = 5, 96, 96


@pytest.fixture(scope="module")
def shared_engine(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine(
        tiny_model,
        {
            "sink": SINK,
            "window": WINDOW,
            "max_source_len": MAX_SOURCE,
            "positions": "absolute",
        },
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The shared engine, with no prefix cached and every block back afterwards."""
    shared_engine.forget_prefixes()
    yield shared_engine
    shared_engine.check_all_free()
