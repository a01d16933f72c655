"""docs/limits.md says all that the code refuses, and every flag."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

from bounded_kv_server.settings import SpeechSettings, _flag
from vllm_bounded_kv.engine.policy import REQUEST_KEYS, EnginePolicy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text()
SOURCES = [
    *(ROOT / "server" / "bounded_kv_server").glob("*.py"),
    *(ROOT / "vllm_bounded_kv" / "engine").glob("*.py"),
]


def rows() -> set[tuple[int, str]]:
    """Status and field of each row; an empty field: none."""
    found = set()
    for status, fields in re.findall(r"^\| (\d{3}) \| ([^|]*)\|", PAGE, re.MULTILINE):
        found |= {(int(status), field) for field in re.findall(r"`(\w+)`", fields) or [""]}
    return found


def refusals() -> set[tuple[int, str]]:
    """Those that the code writes out; an error of vLLM's, handed on, has its own."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in (
                "SpeechError",
                "SourceError",
            ):
                continue
            status, field = node.args[:2]
            if isinstance(status, ast.Constant) and isinstance(field, ast.Constant):
                found.add((status.value, field.value or ""))
    return found


def test_every_status_and_field_has_its_row() -> None:
    generic = {(400, ""), (500, "")}  # what is wrong has no field, or nobody foresaw it
    assert len(refusals()) > 15
    assert refusals() - rows() - generic == set()


def test_every_flag_and_argument_is_there() -> None:
    flags = {_flag(each.name) for each in dataclasses.fields(SpeechSettings)}
    for each in dataclasses.fields(EnginePolicy):
        if each.name not in ("window_includes_step", "num_draft_tokens"):  # no flags
            flags.add(f"--bounded-kv-{each.name.replace('_', '-')}")
    wanted = flags | set(REQUEST_KEYS) | {"window_includes_step", "--bounded-kv-config"}
    assert {name for name in wanted if f"`{name}" not in PAGE} == set()


def test_every_kind_that_is_refused_is_there() -> None:
    tree = ast.parse((ROOT / "vllm_bounded_kv" / "engine" / "refusals.py").read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    named = {
        flag for text in texts if isinstance(text, str) for flag in re.findall(r"--[a-z-]+", text)
    }
    own = {"--kv-plugin", "--speculative-config", "--runner"}
    assert {flag for flag in named - own if flag not in PAGE} == set()
