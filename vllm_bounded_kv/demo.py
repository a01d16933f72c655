"""`make demo`: watch a stream outgrow its cache.

Builds the default model, serves it with a small bounded cache, streams one chat answer several
times longer than that cache through the stock `openai` client, and shows what it held meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
from openai import OpenAI

from vllm_bounded_kv.default_model import ensure_default_model
from vllm_bounded_kv.launch import VllmServer

QUESTION = (
    "Write a long, detailed story about a lighthouse keeper who finds a message in a bottle, "
    "sets out to sea and meets many people on the way."
)
SERVED_NAME = "smollm2"


@dataclass
class Reading:
    """The stream as the server showed it once."""

    num_tokens: int
    position: int
    blocks: int
    evicted: int


@dataclass
class Telling:
    """One streamed answer."""

    times: list[float] = field(default_factory=list)
    """Arrival of each token, in seconds."""
    readings: list[Reading] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    first_token_s: float = 0.0


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the process's exit status."""
    args = _parse(argv)
    model = args.model or str(ensure_default_model())
    flags = [
        *("--served-model-name", SERVED_NAME, "--kv-plugin", "bounded"),
        *("--bounded-kv-sink", str(args.sink), "--bounded-kv-window", str(args.window)),
        *("--dtype", args.dtype, "--max-num-seqs", "8", "--enforce-eager"),  # starts sooner
        *("--max-model-len", str(args.max_model_len)),
    ]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    print(f"$ vllm serve {model} {' '.join(flags)}", flush=True)
    with VllmServer(model, flags, env, on_wait=_show_wait) as server:
        print("\r" + " " * 60 + "\r", end="")
        for line in server.log.splitlines():
            if "Bounded KV cache:" in line:
                print("server:", line.split("] ", 1)[-1], "\n")
        telling = _stream(server.url, args.tokens or 4 * (args.sink + args.window) + 64)
        _table(telling, args)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--sink", type=int, default=4)
    parser.add_argument("--window", type=int, default=252)
    parser.add_argument("--tokens", type=int, help="default: four times the cache and some")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args(argv)


def _show_wait(seconds: float) -> None:
    print(f"\rstarting vLLM ... {seconds:3.0f} s (about a minute)", end="", flush=True)


def _stream(url: str, max_tokens: int) -> Telling:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    telling = Telling()
    print(f"> {QUESTION}\n", flush=True)
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=SERVED_NAME,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=max_tokens,
        temperature=0.7,
        seed=1,
        stream=True,
        # A model this small repeats itself soon, with or without a bound.
        extra_body={"ignore_eos": True, "min_p": 0.05, "repetition_penalty": 1.1},
    )
    read_at = {1, max_tokens // 2, max_tokens - 8}
    for chunk in stream:
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text is None:
            continue
        if not telling.times:
            telling.first_token_s = time.perf_counter() - start
        telling.times.append(time.perf_counter())
        sys.stdout.write(text)
        sys.stdout.flush()
        if len(telling.times) in read_at:
            _read(url, telling)
    print("\n")
    return telling


def _read(url: str, telling: Telling) -> None:
    telling.figures = httpx.get(f"{url}/v1/bounded_kv", timeout=30).raise_for_status().json()
    for stream in telling.figures["streams"]:
        telling.readings.append(
            Reading(
                num_tokens=len(telling.times),
                position=stream["position"],
                blocks=stream["blocks"],
                evicted=stream["evicted"],
            )
        )
        telling.times[-1] = time.perf_counter()  # the reading is not the model's time


def _table(telling: Telling, args: argparse.Namespace) -> None:
    gaps = [b - a for a, b in zip(telling.times, telling.times[1:], strict=False)]
    tenth = max(1, len(gaps) // 10)
    block_bytes, block_size = telling.figures["block_bytes"], telling.figures["block_size"]
    end = telling.readings[-1]
    stock_now = -(-end.position // block_size) * block_bytes
    stock_full = -(-args.max_model_len // block_size) * block_bytes
    rows = [("", "position", "evicted", "blocks held", "stock vLLM would hold")]
    for name, reading in zip(("start", "middle", "end"), telling.readings, strict=True):
        rows.append(
            (
                name,
                f"{reading.position:,}",
                f"{reading.evicted:,}",
                f"{reading.blocks}",
                f"{-(-reading.position // block_size)}",
            )
        )
    for row in rows:
        print("{:>8}{:>12}{:>12}{:>14}{:>24}".format(*row))
    print(
        f"\n{len(telling.times):,} tokens through a cache of {args.sink} + {args.window} entries"
        f"\ntime to first token    {telling.first_token_s * 1e3:8.0f} ms"
        f"\nITL, first tenth       {median(gaps[:tenth]) * 1e3:8.1f} ms (median)"
        f"\nITL, last tenth        {median(gaps[-tenth:]) * 1e3:8.1f} ms (median)"
        f"\nbytes of this stream   {end.blocks * block_bytes:12,} for ever"
        f"\nstock vLLM, by now     {stock_now:12,} and growing"
        f"\nstock vLLM, at {args.max_model_len:<7,}{stock_full:12,}"
    )


if __name__ == "__main__":
    sys.exit(main())
