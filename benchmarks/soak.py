"""`python -m benchmarks.soak`: one stream of a million tokens over HTTP, beside short ones.

Shows that the blocks it holds, the memory of the server's processes beyond a few bytes a token, and
its latency stay what they were. Ends in one JSON line; exit status 1 when one of them does not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.geometry import kv_bytes_per_token, vocab_size
from benchmarks.server_processes import let_front_end_go_first
from benchmarks.soak_run import BESIDE_PROMPT_TOKENS, PROMPT_TOKENS, Plan, Progress, Soaked, soak
from benchmarks.soak_verdict import Limits, Spread, Verdict, judge
from benchmarks.tiny_llama import VOCAB_SIZE, TinyLlama, write_tiny_llama
from vllm_bounded_kv.launch import VllmServer

SERVED = "soak"
BLOCK_SIZE = 32
SPARE_STREAMS = 1
"""The server has room for more than run, so that a slot kept too long shows as one too many."""
MIN_TOKENS = 1000
"""Ten tenths of enough tokens for a median."""
NUM_READINGS = 200
FRESH_SHARE = 50
"""A new stream of one part in so many is timed after the end, under the same conditions."""
SOAK_LLAMA = TinyLlama(num_words=4096 - VOCAB_SIZE)
"""Of the tests' model, ids are below 257, which cost CPython nothing: real ones are not."""
RESULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "soak.json"


def main(argv: list[str] | None = None) -> int:
    """Run the soak; returns the exit status."""
    args = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        if args.model is None:
            model, token_ids = str(write_tiny_llama(Path(folder), SOAK_LLAMA)), SOAK_LLAMA.said
        else:
            model, token_ids = args.model, range(10, vocab_size(args.model))
        plan = make_plan(args.tokens, args.beside, token_ids)
        flags = server_flags(model, plan, args.sink, args.window)
        print(f"$ vllm serve {model} {' '.join(flags)}", flush=True)
        with VllmServer(model, flags, {"VLLM_LOGGING_LEVEL": "INFO"}) as server:
            assert server.process is not None
            let_front_end_go_first(server.process.pid)
            with tqdm(total=args.tokens, unit=" tokens", file=sys.stderr) as bar:
                soaked = soak(server.url, server.process.pid, plan, lambda p: _show(bar, p))
    verdict = judge(
        soaked.readings, soaked.arrivals, soaked.leftover_blocks, Limits(slots=args.beside + 1)
    )
    result = {"setup": _describe(args, plan), **report(soaked, verdict)}
    _write(args.out, result)
    _print_verdict(verdict)
    print(json.dumps(result))
    return 1 if verdict.failures else 0


def make_plan(tokens: int, beside: int, token_ids: range, num_readings: int = NUM_READINGS) -> Plan:
    """The plan of the command, and of the test that runs it in short."""
    streams = beside + 1 + SPARE_STREAMS
    return Plan(
        model=SERVED,
        tokens=tokens,
        beside=beside,
        token_ids=token_ids,
        step_tokens=2 * streams,
        num_readings=num_readings,
        fresh_tokens=max(tokens // FRESH_SHARE, MIN_TOKENS // 10),
    )


def server_flags(model: str, plan: Plan, sink: int, window: int) -> list[str]:
    """Arguments of `vllm serve` that fit the plan."""
    streams = plan.beside + 1 + SPARE_STREAMS
    slot_blocks = -(-(sink + window) // BLOCK_SIZE)
    pool_blocks = streams * slot_blocks + 1  # one is vLLM's null block
    longest = PROMPT_TOKENS + plan.tokens
    return [
        *("--served-model-name", plan.model, "--dtype", "float32", "--enforce-eager"),
        *("--kv-plugin", "bounded", "--bounded-kv-positions", "rebase"),
        *("--bounded-kv-sink", str(sink), "--bounded-kv-window", str(window)),
        *("--max-model-len", str(longest + BLOCK_SIZE), "--max-num-seqs", str(streams)),
        *("--max-num-batched-tokens", str(plan.step_tokens), "--block-size", str(BLOCK_SIZE)),
        *(
            "--kv-cache-memory-bytes",
            str(pool_blocks * BLOCK_SIZE * kv_bytes_per_token(model)),
        ),
        *("--api-server-count", "1", "--disable-uvicorn-access-log"),
    ]


def report(soaked: Soaked, verdict: Verdict) -> dict[str, Any]:
    """All figures as plain values."""
    values: dict[str, Any] = verdict.to_dict()
    values |= {
        "seconds": round(soaked.seconds, 1),
        "streams_beside": soaked.num_beside,
        "leftover_blocks": soaked.leftover_blocks,
        "share_of_ids_above_256": round(soaked.share_of_large_ids, 4),
        "chars_per_token": round(soaked.num_chars / sum(soaked.arrivals.num_tokens), 2),
        "tokens_per_piece": round(
            sum(soaked.arrivals.num_tokens) / len(soaked.arrivals.num_tokens), 3
        ),
    }
    if soaked.fresh is not None:
        fresh = soaked.fresh.itl_ms()
        last = soaked.arrivals.itl_ms()[-len(fresh) :]
        values["itl_ms_just_before_the_end"] = Spread.of(last).to_dict()
        values["itl_ms_of_a_new_stream_just_after"] = Spread.of(fresh).to_dict()
        values["itl_ratio_to_a_new_stream"] = round(float(np.median(last) / np.median(fresh)), 4)
    return values


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the long stream")
    parser.add_argument("--beside", type=int, default=15, help="short streams at any time")
    parser.add_argument("--model", help="folder or hub name (default: a tiny random Llama)")
    parser.add_argument("--sink", type=int, default=4)
    parser.add_argument("--window", type=int, default=252)
    parser.add_argument("--out", type=Path, default=RESULT, help="file for the JSON (%(default)s)")
    args = parser.parse_args(argv)
    # Short streams must fit the length that the long one asks for.
    for name, lowest in (("tokens", MIN_TOKENS), ("beside", 0), ("sink", 0), ("window", 1)):
        value = getattr(args, name)
        if value < lowest:
            parser.error(f"--{name} {value}: must be at least {lowest:,}")
    if args.model is not None:
        try:
            vocab_size(args.model)
        except (OSError, ValueError) as error:
            parser.error(f"--model {args.model}: {str(error).splitlines()[0]}")
    if args.out.is_dir():
        parser.error(f"--out {args.out}: is a folder; must be a file")
    for parent in args.out.absolute().parents:
        if parent.exists() and not parent.is_dir():
            parser.error(f"--out {args.out}: {parent} is a file; must be a folder")
    capacity = args.sink + args.window
    if capacity > args.tokens:
        parser.error(
            f"--sink {args.sink} + --window {args.window}: must be at most --tokens "
            f"({args.tokens:,}), or the stream never leaves its cache"
        )
    return args


def _describe(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    import torch
    import vllm

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "model": args.model or f"tiny random Llama, {SOAK_LLAMA.vocab_size} tokens",
        "tokens": args.tokens,
        "beside": args.beside,
        "beside_prompt_tokens": BESIDE_PROMPT_TOKENS,
        "sink": args.sink,
        "window": args.window,
    }


def _show(bar: tqdm[Any], progress: Progress) -> None:
    bar.set_postfix_str(
        f"ITL {progress.itl_ms:.2f} ms, {progress.reading.blocks} blocks, "
        f"{progress.reading.slots_used} slots, "
        f"RSS {sum(progress.reading.rss.values()) / 1e6:,.1f} MB",
        refresh=False,
    )
    bar.update(progress.tokens - bar.n)


def _print_verdict(verdict: Verdict) -> None:
    print(f"\nblocks held by the stream    {verdict.blocks}, in {verdict.num_readings} readings")
    print(
        f"slots used                   at most {verdict.max_slots_used}, "
        f"median {verdict.median_slots_used:g}"
    )
    for name, values in verdict.rss_mb.items():
        value = verdict.bytes_per_token_of.get(name, verdict.bytes_per_token)
        print(
            f"RSS, {name:<24}{values[1]:10,.1f} MB to {values[-1]:10,.1f} MB "
            f"{value:8.1f} bytes a token"
        )
    for name, values in verdict.cpu_ms_per_token.items():
        print(f"CPU, {name:<24}{values[1]:10.2f} ms to {values[-1]:10.2f} ms a token")
    for i, spread in enumerate(verdict.itl_ms, 1):
        low, high = spread.quartiles
        print(f"ITL, tenth {i:<2} {spread.median:8.3f} ms (quartiles {low:.3f} to {high:.3f})")
    print(f"last tenth over second       {verdict.itl_ratio:.3f}")
    for failure in verdict.failures:
        print(f"FAILED: {failure}")


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
