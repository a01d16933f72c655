"""The host's time for a step's attention metadata in vLLM, the plan included: ours and stock's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.interleaved import interleaved
from benchmarks.tiny_llama import write_tiny_llama

BLOCK_SIZE, SINK_LEN, RING_LEN = 32, 4, 508
LIMIT = 2048
WRITTEN = (0, 1024, 1_000_000, 1_000_000_000)


def engine_rows(batch: int = 64) -> Iterator[dict[str, Any]]:
    """Microseconds to build the metadata of a step of `batch` one-token rows, by how far their
    streams have come: with positions that fall back, without, and stock vLLM's for as many keys."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="bench-kernels-") as folder:
        model = str(write_tiny_llama(Path(folder)))
        stock = _stock(model, batch)
        bounded = {name: _bounded(model, batch, name) for name in ("absolute", "rebase")}
        for written in WRITTEN:
            times = interleaved([stock, *(partial(make, written) for make in bounded.values())])
            names = ("stock_us", *(f"{name}_us" for name in bounded))
            yield {
                "batch": batch,
                "written": written,
                **{name: round(1e6 * t, 1) for name, t in zip(names, times, strict=True)},
            }


def _stock(model: str, batch: int) -> Callable[[], Any]:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    config = _config(model, batch)
    builder = CPUAttentionMetadataBuilder(_spec(), [], config, torch.device("cpu"))
    blocks = (SINK_LEN + RING_LEN) // BLOCK_SIZE
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    common = _common(table, torch.full((batch,), SINK_LEN + RING_LEN, dtype=torch.int32))
    return lambda: builder.build(0, common)


def _bounded(model: str, batch: int, positions: str) -> Callable[[int], Any]:
    from vllm_bounded_kv.engine.header import HEADER_LEN, RING, SINK
    from vllm_bounded_kv.engine.metadata import BoundedCPUMetadataBuilder
    from vllm_bounded_kv.engine.settings import policy_of
    from vllm_bounded_kv.engine.spec import bounded_spec

    policy = {"sink": SINK_LEN, "window": RING_LEN, "positions": positions}
    if positions == "rebase":
        policy["position_limit"] = LIMIT
    config = _config(model, batch, {"kv_plugin": "bounded", "bounded_kv": policy})
    settled = policy_of(config)
    assert settled is not None
    spec = bounded_spec(_spec(), settled)
    builder = BoundedCPUMetadataBuilder(spec, [], config, torch.device("cpu"))
    blocks = (SINK_LEN + RING_LEN) // BLOCK_SIZE
    table = torch.empty(batch, HEADER_LEN + blocks, dtype=torch.int32)
    table[:, SINK], table[:, RING] = SINK_LEN, RING_LEN
    table[:, HEADER_LEN:] = torch.arange(batch * blocks).view(batch, blocks)
    common = _common(table, torch.empty(batch, dtype=torch.int32))

    def build(written: int) -> Any:
        common.seq_lens.fill_(written + 1)
        return builder.build(0, common)

    return build


def _config(model: str, batch: int, additional: dict[str, Any] | None = None) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=batch,
        kv_cache_memory_bytes=64 << 20,
        block_size=BLOCK_SIZE,
        additional_config=additional or {},
    ).create_engine_config()


def _spec() -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
    )


def _common(table: torch.Tensor, lens: torch.Tensor) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    batch = len(table)
    start = torch.arange(batch + 1, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=lens,
        num_reqs=batch,
        num_actual_tokens=batch,
        max_query_len=1,
        max_seq_len=SINK_LEN + RING_LEN,
        block_table_tensor=table,
        slot_mapping=torch.zeros(batch, dtype=torch.int64),
        positions=torch.zeros(batch, dtype=torch.int64),
    )
