"""Triton is set up before anything imports it: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from support import interpreted_triton

WHY_NOT = interpreted_triton.prepare()
KERNELS = ["test_triton*.py", "test_paged.py", "test_gpu_backend.py"]
collect_ignore_glob: list[str] = KERNELS if WHY_NOT else []


def pytest_report_header() -> str:
    how = WHY_NOT or ("compiled" if interpreted_triton.DEVICE == "cuda" else "interpreted")
    return f"Triton kernels: {how}"
