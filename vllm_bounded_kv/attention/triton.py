"""Attention over a slot pool on GPUs: two or three Triton kernels per layer, nothing gathered.

`attend_launches` and `store_launch` turn a call into kernels, grids and arguments by shapes and
addresses alone; the plan's values are read from its table on the device. So nothing waits for the
device, nothing is allocated but `out` where none is given, and a captured CUDA graph serves every
step of the same shapes.

Products of operands that are all of one half precision are taken as they are, the softmax weights
rounded to it (as FlashAttention does); where dtypes differ operands are widened to float32. Sums
are float32, or float64 for a float64 `q`.

Where a step has too few queries to fill the device, several programs share each tile of them and
meet in a workspace, one per device: run `attend` from one stream of it at a time. It is allocated
by the first call, and kernels are compiled by the first of their kind: run once before capturing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_bounded_kv.attention.checks import check
from vllm_bounded_kv.attention.triton_kernels import LOG2_E, attend_kernel, merge_kernel
from vllm_bounded_kv.attention.triton_store import store_kernel
from vllm_bounded_kv.layout import MAX_READS, MAX_WRITES, ROW_INTS
from vllm_bounded_kv.step_plan import StepPlan

MIN_TILE = 16
"""Least side of a product on tensor cores."""
MAX_QUERIES = 64
"""To a tile, of half precision."""
MAX_WIDE_QUERIES = 16
"""To a tile, of float32 or float64: exact products take no tensor cores, and unroll."""
MAX_KEYS = 64
"""To a tile."""
KEY_TILE_BYTES = 16 << 10
"""Of a tile's keys, and of its values: two stages of both fit every GPU's shared memory."""
WORKSPACE_BYTES = 16 << 20
PROGRAMS_PER_PROCESSOR = 2
"""Fewer leave a GPU idle, so keys are split until there are as many."""


class Launch(NamedTuple):
    """One kernel with all that it is launched with."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]

    def run(self) -> None:
        """Queue it on the current stream."""
        self.kernel[self.grid](*self.args, **self.meta)


@dataclass(frozen=True)
class Tiles:
    """How a call is cut up; from shapes and dtypes alone."""

    num_queries: int
    num_keys: int
    width: int
    """`D` made a power of two."""
    query_tiles: int
    splits: int
    """Programs to a tile of queries."""

    @classmethod
    def of(cls, q: Tensor, slots: Tensor, longest: int, itemsize: int) -> Tiles:
        """The tiles for `q` `[B * rows, H, T, D]`.

        Args:
            q, slots: as `Attend` has them.
            longest: most keys that a row can have.
            itemsize: of an operand, in bytes.
        """
        batch, num_heads, num_tokens, head_dim = q.shape
        num_kv_heads = slots.shape[2]
        queries = num_heads // num_kv_heads * num_tokens
        width = max(MIN_TILE, triton.next_power_of_2(head_dim))
        most = MAX_QUERIES if itemsize == 2 else MAX_WIDE_QUERIES
        num_queries = min(most, max(MIN_TILE, triton.next_power_of_2(queries)))
        num_keys = max(MIN_TILE, min(MAX_KEYS, KEY_TILE_BYTES // (width * itemsize)))
        query_tiles = triton.cdiv(queries, num_queries)
        programs = batch * num_kv_heads * query_tiles
        bytes_each = num_queries * (width + 2) * 4
        splits = min(
            programs_wanted(q.device) // programs,
            WORKSPACE_BYTES // (programs * bytes_each),
            triton.cdiv(longest, num_keys),
        )
        if q.dtype == torch.float64:  # the workspace holds float32
            splits = 1
        return cls(num_queries, num_keys, width, query_tiles, max(splits, 1))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    plan: StepPlan,
    *,
    sources: Tensor | None = None,
    row_sources: Tensor | None = None,
    query_window: int | None = None,
    reverse_step_order: bool = False,
    rel_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One layer of one step: see `Attend`. Slots and sources have a last axis of stride 1."""
    check(q, k, v, slots, plan, sources, row_sources, rel_bias, out, reverse_step_order)
    for name, storage in (("slots", slots), ("sources", sources), ("row_sources", row_sources)):
        if storage is not None and storage.stride(-1) != 1:
            raise ValueError(
                f"{name} must have a last axis of stride 1, got strides {storage.stride()}"
            )
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    if out.numel():
        for launch in (
            *attend_launches(
                q, k, v, slots, plan.table, sources, row_sources, query_window, rel_bias, out
            ),
            store_launch(k, v, slots, plan.table, reverse_step_order),
        ):
            launch.run()
    return out


def attend_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    table: Tensor,
    sources: Tensor | None,
    row_sources: Tensor | None,
    query_window: int | None,
    rel_bias: Tensor | None,
    out: Tensor,
) -> list[Launch]:
    """The kernels that read, for arguments that fit: attention, and a merge if keys are split."""
    batch, num_heads, num_tokens, head_dim = q.shape
    rows, num_kv_heads = slots.shape[1:3]
    group = num_heads // num_kv_heads
    given = [tensor for tensor in (sources, row_sources) if tensor is not None]
    storages = {tensor.dtype for tensor in (slots, *given)}
    operand, sums = _dtypes(storages | {q.dtype})
    longest = sum(tensor.shape[3] for tensor in (slots, *given)) + num_tokens
    tiles = Tiles.of(q, slots, longest, operand.primitive_bitwidth // 8)
    is_split = tiles.splits > 1
    partial = workspace(q.device) if is_split else None
    shared = {
        "HEAD_DIM": head_dim,
        "NUM_QUERIES": tiles.num_queries,
        "WIDTH": tiles.width,
        "SUM": sums,
    }
    attention = Launch(
        attend_kernel,
        (batch * num_kv_heads, tiles.query_tiles, tiles.splits),
        (
            *(q, k, v, slots, sources, row_sources, rel_bias, table, out, partial),
            *(_strides(t) for t in (q, k, v, slots, sources, row_sources, rel_bias)),
            *(rows, num_kv_heads, group, num_tokens, query_window),
        ),
        {
            **shared,
            "ROW_INTS": ROW_INTS,
            "SCALE": LOG2_E / math.sqrt(head_dim),
            "NUM_KEYS": tiles.num_keys,
            "OPERAND": operand,
            "ONE_DTYPE": len(storages) == 1,
            "SPLIT": is_split,
            # Wide operands are short of registers, not of loads in flight.
            "num_stages": 2 if operand.primitive_bitwidth == 16 else 1,
        },
    )
    if not is_split:
        return [attention]
    merge = Launch(
        merge_kernel,
        (batch * num_kv_heads, tiles.query_tiles),
        (partial, out, tiles.splits, num_kv_heads, group, num_tokens),
        shared,
    )
    return [attention, merge]


def store_launch(
    k: Tensor, v: Tensor, slots: Tensor, table: Tensor, reverse_step_order: bool
) -> Launch:
    """The kernel that writes, for arguments that fit."""
    batch, num_kv_heads, num_tokens, head_dim = k.shape
    num_at_once = min(MAX_KEYS, triton.next_power_of_2(num_tokens))
    return Launch(
        store_kernel,
        (batch * num_kv_heads, triton.cdiv(num_tokens, num_at_once)),
        (
            *(k, v, slots, table),
            *(_strides(t) for t in (k, v, slots)),
            *(slots.shape[1], num_kv_heads),
        ),
        {
            "ROW_INTS": ROW_INTS,
            "FIRST_WRITE": 2 + 2 * MAX_READS,
            "NUM_WRITES": MAX_WRITES,
            "REVERSE": reverse_step_order,
            "HEAD_DIM": head_dim,
            "NUM_TOKENS": num_at_once,
            "WIDTH": triton.next_power_of_2(head_dim),
        },
    )


@cache
def programs_wanted(device: torch.device) -> int:
    """Programs that keep a device busy."""
    if device.type != "cuda":  # Triton's interpreter runs one after the other
        return 1
    properties = torch.cuda.get_device_properties(device)
    return PROGRAMS_PER_PROCESSOR * int(properties.multi_processor_count)


@cache
def workspace(device: torch.device) -> Tensor:
    """`[WORKSPACE_BYTES / 4]` float32 for split keys, the same at every call."""
    return torch.empty(WORKSPACE_BYTES // 4, dtype=torch.float32, device=device)


def _dtypes(dtypes: set[torch.dtype]) -> tuple[tl.dtype, tl.dtype]:
    """What products are taken of and what sums are kept in, for tensors of these dtypes."""
    if torch.float64 in dtypes:
        return tl.float64, tl.float64
    if dtypes == {torch.bfloat16}:
        return tl.bfloat16, tl.float32
    if dtypes == {torch.float16}:
        return tl.float16, tl.float32
    return tl.float32, tl.float32


def _strides(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.stride()
