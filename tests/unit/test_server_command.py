"""`bounded-kv-server`: what it becomes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from bounded_kv_server import cli
from bounded_kv_speech.package import BUILT_IN, ONE_PROCESS, model_of


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with the words of the command."""
    words: list[str] = []

    def become(_file: str, command: Sequence[str]) -> None:
        words.extend(command)

    monkeypatch.setattr(os, "execvp", become)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    return words


def test_the_embedded_voice(became: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    cli.main([])
    assert became[:3] == ["vllm", "serve", str(model_of(BUILT_IN))]
    assert became[became.index("--distributed-executor-backend") + 1] == ONE_PROCESS
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_what_is_asked_for_wins(became: list[str]) -> None:
    cli.main(["--distributed-executor-backend", "mp", "--port", "1"])
    assert became[-2:] == ["--distributed-executor-backend", "mp"]
    assert became[became.index("--port") + 1] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_another_model_is_run_as_vllm_would(
    became: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    cli.main(["--model", "theirs"])
    assert became[2] == "theirs" and "--distributed-executor-backend" not in became
    assert "OMP_NUM_THREADS" not in os.environ
