"""The Triton kernels on a GPU: against one SDPA call on keys that lie dense already, and against
the bandwidth of the memory.

Not run by this project's CI, which has no GPU. Both sides run from CUDA graphs of a few layers, so
that no launch on the host counts, and each layer has bytes of its own, so that no cache serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from vllm_bounded_kv.config import BoundedKVConfig, BoundedKVStep, SinkWindow, StreamPosition
from vllm_bounded_kv.manager import BoundedKVManager

HEADS, KV_HEADS, HEAD_DIM, SINK = 32, 8, 128, 4
DTYPE = torch.bfloat16
BATCHES, WINDOWS, TOKENS = (1, 8, 32, 128), (256, 1024, 8192), (1, 16)
MIN_BYTES = 512 << 20
"""That the layers of a graph read: several times the largest cache."""
MAX_LAYERS = 64
COPY_BYTES = 1 << 30
REPEATS = 20


def gpu_rows() -> Iterator[dict[str, Any]]:
    """One row per shape: microseconds of a layer on both sides, medians, and the share that ours
    reaches of a plain copy's bandwidth, which is measured first."""
    bandwidth = _copy_bandwidth()
    for num_tokens in TOKENS:
        for window in WINDOWS:
            for batch in BATCHES:
                yield _row(batch, window, num_tokens, bandwidth)
                torch.cuda.empty_cache()


def _row(batch: int, window: int, num_tokens: int, bandwidth: float) -> dict[str, Any]:
    entries = SINK + window + num_tokens
    layer_bytes = batch * KV_HEADS * entries * 2 * HEAD_DIM * DTYPE.itemsize
    num_layers = min(MAX_LAYERS, max(1, -(-MIN_BYTES // layer_bytes)))
    shape = {"batch": batch, "window": window, "tokens": num_tokens}
    # Slots and dense copies both, and room for the rest.
    if 2.5 * layer_bytes * num_layers > torch.cuda.mem_get_info()[0]:
        return {**shape, "skipped": "not enough memory"}
    ours = _seconds(_pool_layers(batch, window, num_tokens, num_layers)) / num_layers
    torch.cuda.empty_cache()
    dense = _seconds(_dense_layers(batch, entries, num_tokens, num_layers)) / num_layers
    return {
        **shape,
        "us": round(1e6 * ours, 1),
        "sdpa_us": round(1e6 * dense, 1),
        "ratio": round(ours / dense, 2),
        "gb_s": round(layer_bytes / ours / 1e9),
        "copy_gb_s": round(bandwidth / 1e9),
        "share": round(layer_bytes / ours / bandwidth, 2),
    }


def _pool_layers(batch: int, window: int, num_tokens: int, num_layers: int) -> Callable[[], None]:
    """One step of every layer, over rings that are full and wrap."""
    config = BoundedKVConfig(
        num_layers=num_layers,
        num_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rows_per_request=1,
        max_source_len=0,
        retention=SinkWindow(SINK, window),
        max_slots=batch,
        dtype=DTYPE,
    )
    manager = BoundedKVManager(config, "cuda")
    manager.slots.normal_()
    names = [f"request {i}" for i in range(batch)]

    def step(written: int, span: int) -> BoundedKVStep:
        positions = {name: StreamPosition(0, written) for name in names}
        return BoundedKVStep([(name, span) for name in names], positions)

    assert not manager.admit(step(0, 0))
    plan = manager.plan(step(SINK + 2 * window + window // 2, num_tokens))
    q, k, v, out = _tokens(batch, num_tokens)

    def run() -> None:
        for layer in range(num_layers):
            manager.attend(layer, q, k, v, plan=plan, out=out)

    return run


def _dense_layers(batch: int, entries: int, num_tokens: int, num_layers: int) -> Callable[[], None]:
    """SDPA of the same queries over as many keys, all of them in place."""
    kv = torch.randn(num_layers, 2, batch, KV_HEADS, entries, HEAD_DIM, dtype=DTYPE, device="cuda")
    q = _tokens(batch, num_tokens)[0]

    def run() -> None:
        for keys, values in kv:
            F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    return run


def _tokens(batch: int, num_tokens: int) -> list[torch.Tensor]:
    """Queries, keys and values of a step, and where its result goes."""
    shapes = [(HEADS, num_tokens), (KV_HEADS, num_tokens), (KV_HEADS, num_tokens)]
    made = [torch.randn(batch, *shape, HEAD_DIM, dtype=DTYPE, device="cuda") for shape in shapes]
    return [*made, torch.empty(batch, num_tokens, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")]


def _copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source))


def _seconds(run: Callable[[], Any]) -> float:
    """Median time of what `run` queues, replayed from a graph."""
    run()  # compiles, and allocates what is kept
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times[2:])
