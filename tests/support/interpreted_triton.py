"""Triton without a GPU: the wheel in `.venv/triton`, interpreted, and two faults of it put right.

With a GPU nothing here happens: kernels are compiled, and run on it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prepare() -> str | None:
    """Import Triton as the tests want it; why that cannot be, or `None`."""
    if DEVICE == "cuda":
        return None
    if "triton" in sys.modules:
        return "triton has been imported without its interpreter: run tests/parity by itself"
    folder = Path(sys.prefix) / "triton"
    if not folder.is_dir():
        return f"{folder} is missing: run scripts/setup"
    sys.path.insert(0, str(folder))
    # Read when a kernel is defined; no process started from here is to see it.
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.experimental.gluon  # noqa: F401  the first launch would, too late

        import vllm_bounded_kv.attention.triton  # noqa: F401
    finally:
        del os.environ["TRITON_INTERPRET"]
        sys.path.remove(str(folder))
    _put_right()
    _hurry()
    return None


def _put_right() -> None:
    """The interpreter keeps bfloat16 as bits: it multiplies them as integers, and casts by cutting.

    Remove when `test_the_interpreter_needs_what_is_put_right` fails.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def round_to_even(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    def dot_of_values(self: Any, a: Any, b: Any, *args: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast(self, operand, tl.float32) for operand in (a, b))
        return dot(self, a, b, *args)

    InterpreterBuilder.cast_impl = round_to_even
    InterpreterBuilder.create_dot = dot_of_values


def _hurry() -> None:
    """Sums and products of ints are also done in 64 bits, to see if 32 are enough: not here."""
    from triton.runtime.interpreter import interpreter_builder

    object.__setattr__(interpreter_builder.options, "sanitize_overflow", False)
