"""The recipe's commands take hours: what is wrong with their options is said at once."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("command", "option", "value", "limit"),
    [
        ("corpus", "--hours", "-1", "above 0"),
        ("corpus", "--hours", "nan", "above 0"),
        ("corpus", "--processes", "0", ">= 1"),
        ("utterances", "--hours", "inf", "above 0"),
        ("utterances", "--first", "-3", ">= 0"),
        ("train_codec", "--steps", "0", ">= 1"),
        ("train_codec", "--decoder-of", "nowhere.pt", "is no file"),
        ("train_lm", "--rate", "0", "above 0"),
        ("train_lm", "--steps", "1.5", ">= 1"),
        ("train_lm", "--begin", "nowhere.pt", "is no file"),
        ("gate", "--sentences", "many", ">= 1"),
        ("choose", "--processes", "0", ">= 1"),
    ],
)
def test_what_is_wrong_is_named(
    command: str,
    option: str,
    value: str,
    limit: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = importlib.import_module(f"bounded_kv_speech.recipe.{command}")
    with pytest.raises(SystemExit) as ended:
        module.main(["--work", str(tmp_path), option, value])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert option in said
    assert repr(value) in said
    assert limit in said
    assert not list(tmp_path.iterdir())
