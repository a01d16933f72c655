"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Processor, threads and versions, for a benchmark's result."""
    import torch
    import vllm

    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }
