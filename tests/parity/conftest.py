"""Triton for kernels' tests: from `<venv>/triton` where it is not installed, and interpreted
where there is no GPU. Set before anything imports it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(sys.prefix) / "triton"))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
