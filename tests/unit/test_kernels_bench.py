"""The kernels' benchmark runs and says what it measured. Not how fast anything is."""

from __future__ import annotations

import json

import pytest

from benchmarks import interleaved, kernels, kernels_cpu


def test_it_ends_in_one_json_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaved, "REPEATS", 1)
    monkeypatch.setattr(kernels_cpu, "SHAPES", kernels_cpu.SHAPES[:1])
    assert kernels.main([]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = result["attention"]
    assert row["tokens"] == 1 and row["ms"] > 0 and row["dense_ms"] > 0
    assert [row["written"] for row in result["planning"]] == [0, 1024, 10**6, 10**9]
    for row in result["metadata"]:
        assert row["rebase_us"] > 0 and row["absolute_us"] > 0 and row["stock_us"] > 0
    assert result["setup"]["threads"] >= 1


def test_the_profile_shows_the_gather(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--profile"]) == 0
    assert "index_select" in capsys.readouterr().out
