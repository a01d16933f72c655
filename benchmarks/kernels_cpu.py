"""The slot pool on CPUs: its attention against one SDPA call on keys that lie dense already, and
the host's time to plan a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.interleaved import interleaved
from vllm_bounded_kv.config import BoundedKVConfig, BoundedKVStep, SinkWindow, StreamPosition
from vllm_bounded_kv.manager import BoundedKVManager

BATCH, WINDOW, HEAD_DIM = 8, 512, 64


@dataclass(frozen=True)
class Shape:
    """One step: 8 rows, a full window of 512 entries each, heads of 64."""

    num_tokens: int
    heads: int = 8
    kv_heads: int = 8


SHAPES = [Shape(1), Shape(4), Shape(16), Shape(64), Shape(1, 8, 2), Shape(16, 8, 2)]


def cpu_rows() -> Iterator[dict[str, Any]]:
    """One row per shape: milliseconds of both, medians of interleaved runs, and their ratio."""
    for shape in SHAPES:
        ours, dense = _pair(shape)
        times = interleaved([ours, dense])
        yield {
            "batch": BATCH,
            "window": WINDOW,
            "tokens": shape.num_tokens,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "ms": round(1e3 * times[0], 3),
            "dense_ms": round(1e3 * times[1], 3),
            "ratio": round(times[0] / times[1], 2),
        }


def profile(calls: int = 20) -> str:
    """PyTorch's profile of our attention of one-token steps, as a table."""
    ours, _ = _pair(SHAPES[0])
    ours()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in range(calls):
            ours()
    table: str = seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=12)
    return table


def plan_rows(batch: int = 64) -> Iterator[dict[str, Any]]:
    """Microseconds of the host to plan a step of `batch` one-token rows, by how far their streams
    have come."""
    manager = BoundedKVManager(_config(Shape(1), max_slots=batch))
    names = [f"request {i}" for i in range(batch)]
    manager.admit(_step(names, 0))
    plan = manager.plan(_step(names, 0))
    for written in (0, 2 * WINDOW, 1_000_000, 1_000_000_000):
        (seconds,) = interleaved([partial(manager.plan, _step(names, written), into=plan)])
        yield {"batch": batch, "written": written, "us": round(1e6 * seconds, 1)}


def _config(shape: Shape, max_slots: int) -> BoundedKVConfig:
    return BoundedKVConfig(
        num_layers=1,
        num_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        rows_per_request=1,
        max_source_len=0,
        retention=SinkWindow(0, WINDOW),
        max_slots=max_slots,
    )


def _step(names: list[str], written: int, span: int = 1) -> BoundedKVStep:
    return BoundedKVStep(
        [(name, span) for name in names], {name: StreamPosition(0, written) for name in names}
    )


def _pair(shape: Shape) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Our attention of a step that wraps, and SDPA over the same number of dense keys."""
    manager = BoundedKVManager(_config(shape, 2 * BATCH))
    manager.slots.normal_()
    names = [f"request {i}" for i in range(2 * BATCH)]
    manager.admit(_step(names, 0))
    # Every other slot, rings at different places.
    at = {name: StreamPosition(0, WINDOW + 37 * i) for i, name in enumerate(names)}
    plan = manager.plan(BoundedKVStep([(name, shape.num_tokens) for name in names[::2]], at))
    q = torch.randn(BATCH, shape.heads, shape.num_tokens, HEAD_DIM)
    k = torch.randn(BATCH, shape.kv_heads, shape.num_tokens, HEAD_DIM)
    keys = torch.randn(BATCH, shape.kv_heads, WINDOW + shape.num_tokens, HEAD_DIM)
    values = torch.randn_like(keys)
    folded = q.reshape(BATCH, shape.kv_heads, -1, HEAD_DIM)  # as fast as SDPA does grouped heads
    return (
        lambda: manager.attend(0, q, k, k, plan=plan),
        lambda: F.scaled_dot_product_attention(folded, keys, values),
    )
