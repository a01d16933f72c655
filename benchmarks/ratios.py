"""`python -m benchmarks ratios`: a bounded cache against stock vLLM, same model, same run.

Rows: inter-token latency and prefill at several positions, a bounded stream late against early,
what falling positions cost, streams held in one pool, and throughput where the pool is scarce.
Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median, quantiles
from typing import Any

from tqdm import tqdm

from benchmarks.engines import BenchEngine, EngineSetup, Task, engines
from benchmarks.geometry import kv_bytes_per_token
from benchmarks.machine import describe_machine
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
    if "latency" in args.rows:
        result |= _latency_rows(args)
    for name, measure in (
        ("depth", _depth_row),
        ("rebase", _rebase_row),
        ("streams", _streams_row),
        ("throughput", _throughput_row),
    ):
        if name in args.rows:
            result[name] = measure(args)
    print(json.dumps(result))
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks ratios", description=__doc__)
    parser.add_argument("--model", help="folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--sink", type=int, default=4)
    parser.add_argument("--window", type=int, default=1020)
    parser.add_argument("--positions", type=int, nargs="+", default=[1024, 4096, 8000])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--block-size", type=int, help="of the bounded engine (default: its own)")
    parser.add_argument(
        "--stock-block-size", type=int, help="of the stock engine (default: its own)"
    )
    rows = ["latency", "depth", "rebase", "streams", "throughput"]
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows)
    return parser.parse_args(argv)


def _describe(args: argparse.Namespace) -> dict[str, Any]:
    return {
        **describe_machine(),
        "dtype": "float32",
        "sink": args.sink,
        "window": args.window,
    }


def _options(block_size: int | None) -> dict[str, Any]:
    return {} if block_size is None else {"block_size": block_size}


def _pair(
    args: argparse.Namespace, policy: dict[str, Any], **common: Any
) -> dict[str, EngineSetup]:
    return {
        STOCK: EngineSetup(args.model, None, options=_options(args.stock_block_size), **common),
        BOUNDED: EngineSetup(args.model, policy, options=_options(args.block_size), **common),
    }


def _in_turns(
    built: dict[str, BenchEngine], positions: dict[str, int], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[list[float]]]]:
    """Seconds to the first token, and then ms of every token up to a position, by engine.

    Machines are noisy for seconds at a time, so decoding alternates every few tokens: each entry
    holds `TURN_TOKENS` durations. The first round is not measured.
    """
    prefill: dict[str, list[float]] = {name: [] for name in built}
    turns: dict[str, list[list[float]]] = {name: [] for name in built}
    label = f"position {' and '.join(map(str, sorted(set(positions.values()))))}"
    for i in tqdm(range(repeats + 1), desc=label, file=sys.stderr):
        order = list(built.items())[:: 1 if i % 2 else -1]  # nobody always goes first
        for name, engine in order:
            prompt_len = positions[name] - TURNS * TURN_TOKENS
            task = Task(1, prompt_len, TURNS * TURN_TOKENS + 1, seed=i)
            prefill[name].append(engine.begin(task))
        for _ in range(TURNS):
            for name, engine in order:
                turns[name].append([s * 1e3 for s in engine.go_on(TURN_TOKENS).step_s])
    return (
        {name: values[1:] for name, values in prefill.items()},
        {name: values[TURNS:] for name, values in turns.items()},
    )


def _ratio(measured: dict[str, list[float]], over: str, under: str) -> dict[str, Any]:
    """Medians, and median and quartiles of the pairwise ratios."""
    ratios = [a / b for a, b in zip(measured[over], measured[under], strict=True)]
    return {
        **{name: round(median(values), 3) for name, values in measured.items()},
        "ratio": round(median(ratios), 3),
        "ratio_quartiles": [round(q, 3) for q in quantiles(ratios, n=4)[::2]],
    }


def _medians(turns: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    return {name: [median(turn) for turn in values] for name, values in turns.items()}


def _latency_rows(args: argparse.Namespace) -> dict[str, Any]:
    """ITL at positions and prefill of as many tokens, from the same requests."""
    rows: dict[str, Any] = {"itl_ms": {}, "prefill_s": {}}
    setups = _pair(args, _policy(args), **_single(args))
    with engines(setups) as built:
        for position in args.positions:
            prefill, turns = _in_turns(built, dict.fromkeys(built, position), args.repeats)
            rows["itl_ms"][position] = _ratio(_medians(turns), BOUNDED, STOCK)
            rows["prefill_s"][position] = _ratio(prefill, BOUNDED, STOCK)
            for name in ("itl_ms", "prefill_s"):
                print(f"{name} at {position}: {rows[name][position]}", flush=True)
    return rows


def _policy(args: argparse.Namespace) -> dict[str, Any]:
    return {"sink": args.sink, "window": args.window}


def _single(args: argparse.Namespace) -> dict[str, Any]:
    """Of engines that serve one stream at a time, up to the last position."""
    return {"max_model_len": max(args.positions) + 64, "pool_bytes": 1 << 30, "max_num_seqs": 4}


def _depth_row(args: argparse.Namespace) -> dict[str, Any]:
    """ITL of a bounded stream at the last position against one at the first, side by side."""
    first, last = min(args.positions), max(args.positions)
    both = _pair(args, _policy(args), **_single(args))
    with engines({"first": both[BOUNDED], "last": both[BOUNDED]}) as built:
        _, turns = _in_turns(built, {"first": first, "last": last}, args.repeats)
    row = {"positions": [first, last], **_ratio(_medians(turns), "last", "first")}
    print(f"depth: {row}", flush=True)
    return row


def _rebase_row(args: argparse.Namespace) -> dict[str, Any]:
    """What falling back costs a step, spread over the steps between two at the default limit."""
    policy = _policy(args)
    capacity = args.sink + args.window
    setups = {
        "absolute": _pair(args, {**policy, "positions": "absolute"}, **_single(args))[BOUNDED],
        # Once in every turn.
        "rebase": _pair(
            args, {**policy, "position_limit": capacity + TURN_TOKENS}, **_single(args)
        )[BOUNDED],
    }
    with engines(setups) as built:
        _, turns = _in_turns(built, dict.fromkeys(built, 2 * capacity), args.repeats)
    extra = [
        sum(rebase) - sum(absolute)
        for rebase, absolute in zip(turns["rebase"], turns["absolute"], strict=True)
    ]
    itl = median(s for turn in turns["absolute"] for s in turn)
    # The limit is four capacities by default, so the period is three.
    row = {
        "ms_each": round(median(extra), 3),
        "ms_each_quartiles": [round(q, 3) for q in quantiles(extra, n=4)[::2]],
        "every_tokens": 3 * capacity,
        "share_of_decoding": round(median(extra) / (3 * capacity * itl), 6),
    }
    print(f"rebase: {row}", flush=True)
    return row


def _pool(args: argparse.Namespace, num_tokens: int) -> int:
    """Bytes for that many tokens, and for vLLM's null block at its largest default size."""
    return kv_bytes_per_token(args.model) * (num_tokens + 128)


def _streams_row(args: argparse.Namespace) -> dict[str, Any]:
    """How many streams of 4k tokens a pool for two of them holds at once."""
    length, full = 4096, 2
    setups = _pair(
        args,
        _policy(args),
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
