"""`bounded-kv size`: what a bounded cache takes of memory, by arithmetic alone.

The figures come from the functions that the engine itself uses: `settings.settle`, `spec`, `slots`
and, for stock vLLM's share, its own full-attention spec.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_bounded_kv.engine.slot_size import SlotSize

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_bounded_kv.engine.policy import EnginePolicy
    from vllm_bounded_kv.engine.slots import Slots

UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
DTYPES = ("auto", "float32", "bfloat16", "float16")
LENGTHS = (10_000, 100_000)
"""Tokens at which full attention is shown, besides the model's own length."""


@dataclass(frozen=True)
class Sizing(SlotSize):
    """What the cache of one model takes; bytes are those of all tensor-parallel workers."""

    model: str
    num_layers: int
    num_kv_heads: int
    """Of all workers."""
    head_dim: int
    dtype: str
    max_model_len: int
    num_workers: int
    full_blocks: dict[int, int]
    """Stream length in tokens to blocks that stock vLLM holds of it at its end."""
    streams: int
    memory: int | None
    """Of each worker, in bytes."""
    slots: Slots | None
    """What `memory` holds."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of all streams where all share one source."""
        own = self.slot_blocks - self.source_blocks
        return (self.source_blocks + self.streams * own) * self.block_bytes

    def to_dict(self) -> dict[str, Any]:
        """As plain values; what `GET /v1/bounded_kv` has too is named alike."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_model_len": self.max_model_len,
            "tensor_parallel_size": self.num_workers,
            "policy": self.policy.to_mapping(),
            "layer_entry_bytes": self.block_bytes // self.num_layers // self.block_size,
            "entry_bytes": self.block_bytes // self.block_size,
            "block_size": self.block_size,
            "block_bytes": self.block_bytes,
            "slot_blocks": self.slot_blocks,
            "slot_bytes": self.slot_bytes,
            "source_blocks": self.source_blocks,
            "memory": self.memory,
            "pool_blocks": self.slots and self.slots.pool_blocks,
            "slots_total": self.slots and self.slots.num_slots,
            "max_pinned_blocks": self.slots and self.slots.max_pinned_blocks,
            "num_streams": self.streams,
            "streams_bytes": self.streams * self.slot_bytes,
            "streams_bytes_one_source": self.shared_bytes,
            "full_attention": [
                {
                    "tokens": tokens,
                    "stream_bytes": blocks * self.block_bytes,
                    "streams_bytes": self.streams * blocks * self.block_bytes,
                }
                for tokens, blocks in self.full_blocks.items()
            ],
        }

    def __str__(self) -> str:
        figures, largest = self.to_dict(), self.policy.largest
        streams = f"{self.streams:,} stream{'s' if self.streams > 1 else ''}"
        workers = f", {self.num_workers} workers" if self.num_workers > 1 else ""
        rows = [
            (
                "model",
                f"{self.num_layers} layers, {self.num_kv_heads} KV heads of {self.head_dim}, "
                f"{self.dtype}, {self.max_model_len:,} tokens{workers}",
            ),
            (
                "an entry",
                f"{figures['layer_entry_bytes']:,} bytes a layer, {figures['entry_bytes']:,} in "
                f"all {self.num_layers}",
            ),
            ("a block", f"{self.block_size} entries, {self.block_bytes:,} bytes"),
            (
                "a slot",
                f"sink {largest.sink} + window {largest.ring} entries in {self.slot_blocks} "
                f"blocks, {self.slot_bytes:,} bytes ({readable(self.slot_bytes)})",
            ),
            ("a source", self._source()),
        ]
        if self.slots is not None:
            memory = readable(self.memory or 0) + (" a worker" if workers else "")
            pool = f"{self.slots.num_slots:,} slots in a pool of {self.slots.pool_blocks:,} blocks"
            rows.append(("memory", f"{memory}: {pool}"))
        rows.append((streams, self._streams()))
        lines = [f"{name:<13} {value}" for name, value in rows]
        lines.append(f"\n{'full attention':<22}{'a stream':>14}{streams:>16}")
        for row in figures["full_attention"]:
            at = f"at {row['tokens']:,} tokens"
            sizes = readable(row["stream_bytes"]), readable(row["streams_bytes"])
            lines.append(f"{at:<22}{sizes[0]:>14}{sizes[1]:>16}")
        return "\n".join(lines)

    def _source(self) -> str:
        if not self.source_blocks:
            return "none of its blocks can be shared: no block fits inside the sink"
        return (
            f"{self.source_blocks} blocks can be shared, "
            f"{self.source_blocks * self.block_bytes:,} bytes"
        )

    def _streams(self) -> str:
        text = f"{readable(self.streams * self.slot_bytes)} at any length"
        if self.source_blocks:
            text += f", {readable(self.shared_bytes)} where all share one source"
        if self.slots is not None and self.streams > self.slots.num_slots:
            text += f"; the memory holds {self.slots.num_slots:,}, the others wait"
            if self.source_blocks:
                own = self.slot_blocks - self.source_blocks
                sharing = (self.slots.pool_blocks - self.source_blocks) // own
                text += f" ({min(self.streams, sharing):,} where all share one source)"
        return text


def sizing_of(
    model: ModelConfig,
    settings: dict[str, Any],
    *,
    name: str,
    block_size: int | None = None,
    num_workers: int = 1,
    memory: int | None = None,
    streams: int | None = None,
) -> Sizing:
    """Size the cache of a model.

    Args:
        model: as vLLM reads it.
        settings: of the policy, as in vLLM's `additional_config["bounded_kv"]`.
        name: what the user calls the model.
        block_size: entries of a block; `None`: what `vllm serve` takes on this machine.
        num_workers: tensor-parallel ones.
        memory: bytes for the cache of each worker; `None`: not told.
        streams: streams at once; `None`: what the memory holds, or one.

    Raises:
        ValueError: as the engine does at start-up, or naming the option, its value and the limit.
    """
    from vllm_bounded_kv.engine.refusals import check_declared_layers, check_model
    from vllm_bounded_kv.engine.slots import blocks_in, divide

    check_model(model)
    check_declared_layers(model)
    _check_at_least_one("--block-size", block_size)
    _check_at_least_one("--streams", streams)
    _check_workers(model, num_workers)
    policy = _policy(model, settings)
    full = _full_attention(model, block_size or default_block_size(), num_workers)
    _check_can_be_bounded(model, full, policy)
    num_layers = model.get_total_num_hidden_layers()
    worker_bytes = full.page_size_bytes * num_layers
    slots = None
    if memory is not None:
        pool_blocks = blocks_in(memory, policy, full.block_size, worker_bytes)
        slots = divide(
            policy,
            block_size=full.block_size,
            block_bytes=worker_bytes * num_workers,
            pool_blocks=pool_blocks,
        )
    return Sizing(
        model=name,
        num_layers=num_layers,
        num_kv_heads=full.num_kv_heads * num_workers,
        head_dim=full.head_size,
        dtype=str(full.dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        num_workers=num_workers,
        policy=policy,
        block_size=full.block_size,
        block_bytes=worker_bytes * num_workers,
        full_blocks={n: _blocks_of(full, n) for n in sorted({model.max_model_len, *LENGTHS})},
        streams=streams or (slots.num_slots if slots else 1),
        memory=memory,
        slots=slots,
    )


def default_block_size() -> int:
    """Entries of a block where `vllm serve` is given no `--block-size`, on this machine."""
    from vllm.config import CacheConfig
    from vllm.platforms import current_platform

    from vllm_bounded_kv.engine.plugin import CPU_BLOCK_SIZE

    return CPU_BLOCK_SIZE if current_platform.is_cpu() else CacheConfig.DEFAULT_BLOCK_SIZE


def _policy(model: ModelConfig, settings: dict[str, Any]) -> EnginePolicy:
    from vllm_bounded_kv.engine import settings as engine_settings
    from vllm_bounded_kv.engine.policy import EnginePolicy

    config: Any = SimpleNamespace(model_config=model, speculative_config=None)
    asked = {
        engine_settings.PLUGIN_KEY: engine_settings.KNOWN_PLUGINS[0],
        engine_settings.POLICY_KEY: settings,
    }
    settled = engine_settings.settle(asked, config)
    return EnginePolicy.from_mapping(settled[engine_settings.POLICY_KEY])


def _full_attention(model: ModelConfig, block_size: int, num_workers: int) -> FullAttentionSpec:
    """Stock vLLM's spec of one layer in one worker."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    parallel: Any = SimpleNamespace(tensor_parallel_size=num_workers)
    head_size = model.get_head_size()
    dtype: Any = model.dtype  # vLLM has settled it
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=head_size,
        head_size_v=getattr(model.hf_text_config, "v_head_dim", None) or head_size,
        dtype=dtype,
    )


def _check_can_be_bounded(
    model: ModelConfig, full: FullAttentionSpec, policy: EnginePolicy
) -> None:
    from vllm_bounded_kv.engine.refusals import UnsupportedError
    from vllm_bounded_kv.engine.spec import BoundedAttentionSpec, bounded_spec

    configs = (model.hf_config, model.hf_text_config)
    if model.has_noops or any(getattr(config, "is_heterogeneous", False) for config in configs):
        raise ValueError(
            "this model's layers differ from each other, so its configuration does not tell what a "
            "block takes; start a server, and read its first lines"
        )
    if not isinstance(bounded_spec(full, policy), BoundedAttentionSpec):
        raise UnsupportedError(
            f"values of another size ({full.head_size_v}) than keys ({full.head_size})",
            "Serve this model without --kv-plugin.",
        )


def _blocks_of(full: FullAttentionSpec, num_tokens: int) -> int:
    """Blocks that stock vLLM holds of a stream, by its own sum."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=num_tokens),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    return int(full.max_memory_usage_bytes(config) // full.page_size_bytes)


def _check_at_least_one(option: str, value: int | None) -> None:
    from vllm_bounded_kv.engine.policy import PolicyError

    if value is not None and value < 1:
        raise PolicyError(option, value, "must be >= 1")


def _check_workers(model: ModelConfig, num_workers: int) -> None:
    from vllm_bounded_kv.engine.policy import PolicyError

    option = "--tensor-parallel-size"
    _check_at_least_one(option, num_workers)
    heads = model.model_arch_config.total_num_attention_heads
    kv_heads = model.get_total_num_kv_heads()
    if heads % num_workers:
        raise PolicyError(option, num_workers, f"must divide the model's {heads} attention heads")
    if kv_heads % num_workers and num_workers % kv_heads:
        raise PolicyError(
            option, num_workers, f"must divide the model's {kv_heads} KV heads, or be a multiple"
        )


# --- the command


def add_command(commands: Any) -> None:
    """Add `size` to `bounded-kv`."""
    parser = commands.add_parser(
        "size",
        help="what a bounded cache takes of memory",
        description="What a bounded cache takes of memory, by the engine's own arithmetic. No "
        "model is loaded.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="folder with config.json, that file, or hub name"
    )
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what sizes a model's cache, all but the model."""
    parser.add_argument("--sink", type=int, metavar="N", help="as --bounded-kv-sink")
    parser.add_argument("--window", type=int, metavar="N", help="as --bounded-kv-window")
    parser.add_argument(
        "--max-source-len", type=int, metavar="N", help="as --bounded-kv-max-source-len"
    )
    parser.add_argument(
        "--memory",
        type=memory_of,
        metavar="BYTES",
        help="for the cache of each worker: 8GiB, 512MiB, 8GB, or bytes",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="as vllm serve --dtype (%(default)s)"
    )
    parser.add_argument(
        "--block-size", type=int, metavar="N", help="entries of a block (vllm serve's here)"
    )
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="workers (%(default)s)"
    )
    parser.add_argument(
        "--streams", type=int, metavar="N", help="streams at once (what --memory holds, or 1)"
    )


def sizing_by(args: argparse.Namespace, memory: int | None) -> Sizing:
    """The sizing that options ask for.

    Raises:
        ValueError: as `sizing_of` and `model.model_config`.
    """
    from vllm_bounded_kv.tools.model import model_config

    settings = {
        name: value
        for name in ("sink", "window", "max_source_len")
        if (value := getattr(args, name)) is not None
    }
    return sizing_of(
        model_config(args.model, args.dtype),
        settings,
        name=args.model,
        block_size=args.block_size,
        num_workers=args.tensor_parallel_size,
        memory=memory,
        streams=args.streams,
    )


def run(args: argparse.Namespace) -> int:
    """Print the sizing; returns the exit status."""
    try:
        sizing = sizing_by(args, args.memory)
    except ValueError as error:
        return _failed(str(error))
    except ImportError as error:
        return _failed(f"{error}; see `bounded-kv doctor`")
    print(json.dumps(sizing.to_dict(), indent=2) if args.json else sizing)
    return 0


def _failed(reason: str) -> int:
    print(f"bounded-kv size: error: {reason}", file=sys.stderr)
    return 2


def memory_of(text: str) -> int:
    """Bytes, as `8GiB`, `512 MiB`, `1.5GB` or a plain number.

    Raises:
        argparse.ArgumentTypeError: with what was written, and what may be.
    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(parts[2]) if parts else None
    if parts is None or unit is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    return int(float(parts[1]) * unit)


def readable(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{value:,.1f} {unit}"
