"""Compile the kernels for GPUs that are not there: one line per kernel, or Triton's error.

`python -m support.compile_kernels FOLDER`, with the folder that Triton is in. Nothing is launched.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class Kind:
    """A call whose kernels differ from those of others."""

    capability: int
    dtype: torch.dtype
    source_dtype: torch.dtype | None
    head_dim: int
    group: int
    num_tokens: int
    query_window: int | None
    has_bias: bool
    programs_wanted: int


KINDS = [
    Kind(80, torch.bfloat16, torch.bfloat16, 128, 4, 1, None, False, 200),
    Kind(90, torch.bfloat16, None, 80, 2, 16, 5, True, 1),
    Kind(90, torch.float16, torch.float32, 64, 1, 3, None, True, 200),
]
MAX_SHARED_BYTES = 99 << 10
"""Of the GPUs with least: those for desktops."""


SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}
"""That a program may have, by compute capability."""


@dataclass(frozen=True)
class PagedKind:
    """A call of the paged attention."""

    capability: int
    dtype: torch.dtype
    head_dim: int
    group: int
    is_turned: bool

    def compile(self) -> Any:
        """The attention kernel, tiled as for a device of this kind."""
        from vllm_bounded_kv.attention import triton_paged
        from vllm_bounded_kv.attention.paged import Turns

        triton_paged.shared_memory = lambda device: SHARED_BYTES[self.capability]  # type: ignore[assignment]
        compiled = []

        class Grid:
            """In place of the kernel: compiles where that would be launched."""

            def __getitem__(self, grid: Any) -> Any:
                return lambda *args, **meta: compiled.append(
                    kernel.warmup(*args, grid=grid, **meta)
                )

        kernel, triton_paged._attend = triton_paged._attend, Grid()
        try:
            q = torch.zeros(9, self.group * 2, self.head_dim, dtype=self.dtype)
            k = torch.zeros(9, 2, self.head_dim, dtype=self.dtype)
            cache = torch.zeros(40, 16, 2, self.head_dim, dtype=self.dtype)
            table = torch.zeros(3, 6, dtype=torch.int32)
            blocks = torch.zeros(3, 8, dtype=torch.int32)
            half = torch.zeros(self.head_dim // 2, dtype=torch.int64)
            turns = Turns(half, True) if self.is_turned else None
            triton_paged.attend(q, k, k, cache, cache, table, blocks, 1.0, turns)
        finally:
            triton_paged._attend = kernel
        return compiled[0]


PAGED_KINDS = [
    PagedKind(80, torch.float32, 256, 1, False),
    PagedKind(86, torch.float32, 128, 4, True),
    PagedKind(89, torch.bfloat16, 128, 4, True),
    PagedKind(89, torch.bfloat16, 256, 8, True),
    PagedKind(120, torch.bfloat16, 80, 8, True),
    PagedKind(90, torch.bfloat16, 128, 4, True),
    PagedKind(89, torch.float16, 64, 3, False),
]


def launches(kind: Kind) -> list[Any]:
    from vllm_bounded_kv.attention import triton

    batch, kv_heads, width = 2, 2, 2 * kind.head_dim
    heads = kind.group * kv_heads
    q = torch.zeros(batch, heads, kind.num_tokens, kind.head_dim, dtype=kind.dtype)
    k = torch.zeros(batch, kv_heads, kind.num_tokens, kind.head_dim, dtype=kind.dtype)
    slots = torch.zeros(2, 1, kv_heads, 600, width, dtype=kind.dtype)
    source = None
    if kind.source_dtype is not None:
        source = torch.zeros(2, 1, kv_heads, 30, width, dtype=kind.source_dtype)
    bias = torch.zeros(batch, heads, kind.num_tokens, 700, dtype=kind.dtype)
    out = torch.zeros(batch, kind.num_tokens, heads, kind.head_dim, dtype=kind.dtype)
    table = torch.zeros(batch, 21, dtype=torch.int32)
    triton.programs_wanted = lambda device: kind.programs_wanted  # type: ignore[assignment]
    return [
        *triton.attend_launches(
            *(q, k, k, slots, table, source, source),
            *(kind.query_window, bias if kind.has_bias else None, out),
        ),
        triton.store_launch(k, k, slots, table, False),
    ]


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    def be(capability: int) -> None:
        target = GPUTarget("cuda", capability, 32)
        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: target,
                get_current_device=lambda: 0,
                get_current_stream=lambda device: 0,
            )
        )

    for paged in PAGED_KINDS:
        be(paged.capability)
        compiled = paged.compile()
        room = SHARED_BYTES[paged.capability]
        assert compiled.metadata.shared <= room, (paged, compiled.metadata.shared)
        print(f"{paged}: paged, {compiled.metadata.shared} of {room} bytes shared")
    for kind in KINDS:
        be(kind.capability)
        for launch in launches(kind):
            compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.meta)
            assert "cubin" in compiled.asm
            assert compiled.metadata.shared <= MAX_SHARED_BYTES, compiled.metadata.shared
            print(f"{kind}: {compiled.metadata.name}, {compiled.metadata.shared} bytes shared")


if __name__ == "__main__":
    main()
