"""`python -m benchmarks`: a bounded cache against stock vLLM, same model, same run.

Four rows: inter-token latency against stream position, prefill against prompt length, streams
held in one pool, and throughput where the pool is scarce. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from statistics import median, quantiles
from typing import Any

from tqdm import tqdm

from benchmarks.engines import BenchEngine, EngineSetup, Task, engines
from vllm_bounded_kv.default_model import ensure_default_model

STOCK, BOUNDED = "stock", "bounded"
TURNS, TURN_TOKENS = 8, 8
"""Decoding alternates between the engines this often, this many tokens at a time."""


def main(argv: list[str] | None = None) -> int:
    """Run the rows asked for; returns the exit status."""
    args = _parse(argv)
    args.model = args.model or str(ensure_default_model())
    result: dict[str, Any] = {"setup": _describe(args)}
    print(f"model {args.model}\n{json.dumps(result['setup'])}", flush=True)
    if {"itl", "prefill"} & set(args.rows):
        result |= _latency_rows(args)
    if "streams" in args.rows:
        result["streams"] = _streams_row(args)
    if "throughput" in args.rows:
        result["throughput"] = _throughput_row(args)
    print(json.dumps(result))
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--sink", type=int, default=4)
    parser.add_argument("--window", type=int, default=1020)
    parser.add_argument("--positions", type=int, nargs="+", default=[1024, 4096, 8000])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--block-size", type=int, help="of the bounded engine (default: its own)")
    parser.add_argument(
        "--stock-block-size", type=int, help="of the stock engine (default: its own)"
    )
    rows = ["itl", "prefill", "streams", "throughput"]
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows)
    return parser.parse_args(argv)


def _describe(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import vllm

    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
        "sink": args.sink,
        "window": args.window,
    }


def _options(block_size: int | None) -> dict[str, Any]:
    return {} if block_size is None else {"block_size": block_size}


def _pair(
    args: argparse.Namespace, policy: dict[str, int], **common: Any
) -> dict[str, EngineSetup]:
    return {
        STOCK: EngineSetup(args.model, None, options=_options(args.stock_block_size), **common),
        BOUNDED: EngineSetup(args.model, policy, options=_options(args.block_size), **common),
    }


def _in_turns(
    built: dict[str, BenchEngine], position: int, repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds to the first token and ms a token up to `position`, on both engines alternately.

    Machines are noisy for seconds at a time, so decoding alternates every few tokens. The first
    round is not measured.
    """
    prefill: dict[str, list[float]] = {name: [] for name in built}
    itl: dict[str, list[float]] = {name: [] for name in built}
    for i in tqdm(range(repeats + 1), desc=f"position {position}", file=sys.stderr):
        task = Task(1, position - TURNS * TURN_TOKENS, TURNS * TURN_TOKENS + 1, seed=i)
        order = list(built.items())[:: 1 if i % 2 else -1]  # nobody always goes first
        for name, engine in order:
            prefill[name].append(engine.begin(task))
        for _ in range(TURNS):
            for name, engine in order:
                itl[name].append(median(engine.go_on(TURN_TOKENS).step_s) * 1e3)
    return (
        {name: values[1:] for name, values in prefill.items()},
        {name: values[TURNS:] for name, values in itl.items()},
    )


def _ratio(measured: dict[str, list[float]], digits: int = 3) -> dict[str, Any]:
    """Medians, and the median of the pairwise ratios bounded / stock."""
    ratios = [b / s for b, s in zip(measured[BOUNDED], measured[STOCK], strict=True)]
    return {
        **{name: round(median(values), digits) for name, values in measured.items()},
        "ratio": round(median(ratios), 3),
        "ratio_quartiles": [round(q, 3) for q in quantiles(ratios, n=4)[::2]],
    }


def _latency_rows(args: argparse.Namespace) -> dict[str, Any]:
    """ITL at positions and prefill of as many tokens, from the same requests."""
    longest = max(args.positions)
    rows: dict[str, Any] = {"itl_ms": {}, "prefill_s": {}}
    setups = _pair(
        args,
        {"sink": args.sink, "window": args.window},
        max_model_len=longest + 64,
        pool_bytes=1 << 30,
        max_num_seqs=4,
    )
    with engines(setups) as built:
        for position in args.positions:
            prefill, itl = _in_turns(built, position, args.repeats)
            rows["itl_ms"][position] = _ratio(itl)
            rows["prefill_s"][position] = _ratio(prefill)
            for name in ("itl_ms", "prefill_s"):
                print(f"{name} at {position}: {rows[name][position]}", flush=True)
    first, last = (rows["itl_ms"][p][BOUNDED] for p in (min(args.positions), longest))
    rows["itl_last_over_first"] = round(last / first, 3)
    return rows


def _bytes_per_token(args: argparse.Namespace) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(args.model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_layer: int = 2 * config.num_key_value_heads * head_dim * 4
    return per_layer * config.num_hidden_layers


def _pool(args: argparse.Namespace, num_tokens: int) -> int:
    """Bytes for that many tokens, and for vLLM's null block at its largest default size."""
    return _bytes_per_token(args) * (num_tokens + 128)


def _streams_row(args: argparse.Namespace) -> dict[str, Any]:
    """How many streams of 4k tokens a pool for two of them holds at once."""
    length, full = 4096, 2
    setups = _pair(
        args,
        {"sink": args.sink, "window": args.window},
        max_model_len=length + 64,
        pool_bytes=_pool(args, full * length),
    )
    task = Task(5 * full, length - 64, 48)
    row: dict[str, Any] = {"length": length, "pool_tokens": full * length}
    with engines(setups) as built:
        for name, engine in tqdm(built.items(), desc="streams", file=sys.stderr):
            engine.begin(task)
            row[name] = engine.go_on().peak_running
    row["by_arithmetic"] = full * length // (args.sink + args.window)
    print(f"streams of {length}: {row}", flush=True)
    return row


def _throughput_row(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of 32 clients on a pool that holds four full streams."""
    length, full, clients = 1024, 4, 32
    policy = {"sink": args.sink, "window": length * full // clients - args.sink}
    setups = _pair(args, policy, max_model_len=length, pool_bytes=_pool(args, full * length))
    task = Task(clients, 32, length - 64)
    row: dict[str, Any] = {
        "clients": clients,
        "length": length,
        "pool_tokens": full * length,
        **policy,
    }
    with engines(setups) as built:
        for name, engine in tqdm(built.items(), desc="throughput", file=sys.stderr):
            engine.begin(task)
            run = engine.go_on()
            row[name] = round(run.num_tokens / run.seconds, 1)
            row[f"{name}_preemptions"] = run.num_preemptions
    row["ratio"] = round(row[BOUNDED] / row[STOCK], 2)
    print(f"throughput: {row}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
