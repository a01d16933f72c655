"""The interpreter takes more than the compiler does: so the kernels are compiled too, for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.interpreted_triton import DEVICE


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile them")
def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "support.compile_kernels", str(Path(sys.prefix) / "triton")],
        cwd=tests,
        env={
            **os.environ,
            "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}",
            "TRITON_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("attend_kernel") == 3
    assert run.stdout.count("paged, ") == 7
    assert run.stdout.count("merge_kernel") == 2
    assert run.stdout.count("store_kernel") == 3
