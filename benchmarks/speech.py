"""`python -m benchmarks.speech`: the speech server under load, as its listeners hear it.

Closed loop: so many clients, each asking again as soon as it has heard all. Open loop: requests
come at random (Poisson) whether or not earlier ones are done, at a share of what the closed loop
has shown the server can do. A listener plays what it has from 100 ms after its first sound on;
where nothing is left to play, that is an underrun. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.voice.texts import sentences
from bounded_kv_server.cli import NAME, embedded_flags
from bounded_kv_server.listener import Listener
from bounded_kv_speech.frames import SAMPLE_RATE
from bounded_kv_speech.package import BUILT_IN, model_of
from vllm_bounded_kv.launch import VllmServer

CLIENTS = (1, 4, 8, 16)
SAMPLE_BYTES = 2
LOAD = 0.7
"""Of what the closed loop has shown, in the open loop."""
EACH = 2
"""Sentences of a request."""
TIMEOUT_S = 300.0


@dataclass
class Heard(Listener):
    """One request, as its listener hears it."""

    took_s: float = 0.0
    status: int = 0


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit status: 1 when a request failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speech",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", help="of a server that runs (default: the embedded voice's own)")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part (%(default)s)")
    parser.add_argument("--package", type=Path, default=BUILT_IN, help="folder of another voice")
    args = parser.parse_args(argv)
    if min(args.clients) < 1 or args.seconds <= 0:
        parser.error("--clients and --seconds: must be above 0")
    if args.url:
        return _report(args, asyncio.run(_measure(args.url, args.clients, args.seconds)))
    most = max(args.clients)
    with VllmServer(model_of(args.package), embedded_flags(args.package, most)) as server:
        found = asyncio.run(_measure(server.url, args.clients, args.seconds))
    return _report(args, found)


def _report(args: argparse.Namespace, found: dict[str, Any]) -> int:
    setup = {
        "machine": platform.processor() or platform.machine(),
        "vllm": version("vllm"),
        "seconds": args.seconds,
        "sentences_a_request": EACH,
    }
    print(json.dumps({"setup": setup, **found}))
    parts = [*found["closed"].values(), found["open"]]
    return int(any(part["failed"] for part in parts))


async def _measure(url: str, clients: Sequence[int], seconds: float) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        closed = {}
        for count in clients:
            closed[str(count)] = await _closed(client, count, seconds)
            print(f"{count:3} clients: {closed[str(count)]}", file=sys.stderr)
        best = max(part["audio_s_per_s"] for part in closed.values())
        return {"closed": closed, "open": await _open(client, LOAD * best, seconds)}


async def _closed(client: httpx.AsyncClient, count: int, seconds: float) -> dict[str, Any]:
    end = time.perf_counter() + seconds

    async def one(number: int) -> list[Heard]:
        heard, i = [], 0
        while time.perf_counter() < end:
            heard.append(await _ask(client, number * 1000 + i))
            i += 1
        return heard

    start = time.perf_counter()
    rows = await asyncio.gather(*map(one, range(count)))
    return _figures([heard for row in rows for heard in row], time.perf_counter() - start)


async def _open(client: httpx.AsyncClient, audio_s_per_s: float, seconds: float) -> dict[str, Any]:
    alone = await _ask(client, 0)
    rate = audio_s_per_s / alone.audio_s
    rng = np.random.default_rng(0)
    tasks: list[asyncio.Task[Heard]] = []
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        tasks.append(asyncio.create_task(_ask(client, len(tasks))))
        await asyncio.sleep(rng.exponential(1 / rate))
    heard = await asyncio.gather(*tasks)
    return {
        "requests_per_s": round(rate, 3),
        **_figures(heard, time.perf_counter() - start),
    }


async def _ask(client: httpx.AsyncClient, number: int) -> Heard:
    texts = sentences()
    text = " ".join(texts[(number * EACH + i) % len(texts)] for i in range(EACH))
    start = time.perf_counter()
    heard = Heard()
    body = {"model": NAME, "input": text, "response_format": "pcm", "seed": number}
    try:
        async with client.stream("POST", "/v1/audio/speech", json=body) as answer:
            async for part in answer.aiter_raw():
                heard.took_s = time.perf_counter() - start
                heard.receive(heard.took_s, len(part) / SAMPLE_BYTES / SAMPLE_RATE)
            heard.status = answer.status_code
    except httpx.HTTPError as error:
        print(f"request {number}: {error!r}", file=sys.stderr)
    return heard


def _figures(heard: Sequence[Heard], took_s: float) -> dict[str, Any]:
    well = [each for each in heard if each.status == 200 and each.audio_s]
    audio = sum(each.audio_s for each in well)

    def of(values: Sequence[float], share: float) -> float | None:
        return round(float(np.quantile(values, share)), 3) if len(values) else None

    first = [h.first_s for h in well if h.first_s is not None]
    factors = [h.took_s / h.audio_s for h in well]
    return {
        "requests": len(heard),
        "failed": len(heard) - len(well),
        "first_audio_s": {"median": of(first, 0.5), "p95": of(first, 0.95)},
        "rtf": {"median": of(factors, 0.5), "p95": of(factors, 0.95)},
        "underruns_per_request": round(sum(h.underruns for h in well) / max(len(well), 1), 2),
        "without_underrun": round(float(np.mean([h.underruns == 0 for h in well] or [False])), 3),
        "continuity": round(audio / max(audio + sum(h.silence_s for h in well), 1e-9), 4),
        "audio_s_per_s": round(audio / took_s, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
