"""Which attention a device gets, and that a CPU's is had without Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vllm_bounded_kv.attention import attend_on


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device must be a CPU or a CUDA GPU, got meta"):
        attend_on(torch.device("meta"))


def test_on_a_cpu_triton_is_not_imported() -> None:
    script = """
import sys
import vllm_bounded_kv.manager
from vllm_bounded_kv.attention import attend_on, cpu
import torch
assert attend_on(torch.device("cpu")) is cpu.attend
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
