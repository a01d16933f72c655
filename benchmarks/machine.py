"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Processor, threads and versions, for a benchmark's result; the GPU, where there is one."""
    machine: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        "torch": torch.__version__,
    }
    try:
        machine["vllm"] = version("vllm")
    except PackageNotFoundError:
        machine["vllm"] = None
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return machine
