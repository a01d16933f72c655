"""`python -m benchmarks serve`: the plugin and its alternatives as servers, on the same work.

Rows: `latency` (one stream alone: reading, ms a token and cache held, by position), `closed` (so
many clients in one pool, each asking again at once), `open` (Poisson arrivals at fixed rates) and
`memory` (all processes). Servers are measured in turns, round by round. What fails is a row that
says why. A stopped run goes on where it was. Ends in a table, a picture and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.geometry import kv_bytes_per_token, max_positions
from benchmarks.machine import describe_machine
from benchmarks.serve.client import AskError
from benchmarks.serve.house import House
from benchmarks.serve.measure import ROWS
from benchmarks.serve.peers import PEERS
from benchmarks.serve.plot import plot
from benchmarks.serve.records import Cell, Records, summary
from benchmarks.serve.table import failures, table
from benchmarks.serve.work import Work


def main(argv: list[str] | None = None) -> int:
    """Measure what has not been measured yet; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        peers = _peers(args.peers)
        work = _work(args)
        records = _records(args, peers, work)
    except ValueError as error:
        parser.error(str(error))
    # Servers have sessions of their own: ended from outside, we still end them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    plan = _plan(args, peers, work)
    cells = [cell for cell in plan if not records.has(cell)]
    if args.report:
        return _report(args, records, plan, work)
    with House(work, args.one_at_a_time) as house:
        for cell in tqdm(cells, desc="serve", file=sys.stderr):
            record = records.add(cell, _measured(house, cell))
            tqdm.write(json.dumps(record), file=sys.stderr)
    return _report(args, records, plan, work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--peers", help=f"of {','.join(PEERS)}; with commas (default: those that are installed)")
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    add("--rounds", type=int, default=3, help="(%(default)s)")
    add("--model", help="a folder (default: SmolLM2-135M-Instruct)")
    add("--sink", type=int, default=4, help="entries (%(default)s)")
    add("--window", type=int, default=252, help="entries (%(default)s)")
    add("--positions", type=int, nargs="+", default=[512, 2048, 4096], help="(up to 4,096)")
    add("--measured", type=int, default=48, help="tokens up to a position (%(default)s)")
    add("--clients", type=int, default=16, help="of the closed loop (%(default)s)")
    add("--prompt", type=int, default=256, help="tokens, under load (%(default)s)")
    add("--length", type=int, default=1024, help="of a stream, closed loop (%(default)s)")
    add("--answer", type=int, default=64, help="tokens, open loop (%(default)s)")
    add("--rates", type=float, nargs="+", default=[0.25, 0.5], help="requests/s, open loop")
    add("--ramp", type=float, default=20.0, help="seconds before the closed loop (%(default)s)")
    add("--seconds", type=float, default=20.0, help="of each loop (%(default)s)")
    add("--ttft-s", type=float, default=2.0, help="a good answer's first token (%(default)s)")
    add("--tpot-s", type=float, default=0.2, help="a good answer's mean token (%(default)s)")
    add("--threads", type=int, help="of each server (default: OMP_NUM_THREADS, or all cores)")
    add("--block-size", type=int, help="of every vLLM (default: stock 128, bounded 32)")
    add("--one-at-a-time", action="store_true", help="do not keep all servers in memory at once")
    add("--out", type=Path, default=Path("build/serve"), help="folder (%(default)s)")
    add("--report", action="store_true", help="of what the folder holds; measure nothing")
    add("--fresh", action="store_true", help="forget what the folder holds")
    return parser


def _peers(names: str | None) -> list[str]:
    """Those asked for, or those installed; what is missing is said.

    Raises:
        ValueError: for a name that is no peer, or none that can run.
    """
    asked = names.split(",") if names else list(PEERS)
    for name in asked:
        if name not in PEERS:
            raise ValueError(f"--peers={name!r}: must be of {', '.join(PEERS)}")
    for name in asked:
        if missing := PEERS[name].missing():
            print(f"{name}: left out: {missing}", file=sys.stderr)
    found = [name for name in asked if not PEERS[name].missing()]
    if not found:
        raise ValueError(f"--peers={names}: none of them is installed")
    return found


def _work(args: argparse.Namespace) -> Work:
    """The work asked for.

    Raises:
        ValueError: naming the option, its value and the limit.
    """
    capacity = args.sink + args.window
    for name, value, least in (
        ("rounds", args.rounds, 1),
        ("sink", args.sink, 0),
        ("window", args.window, 1),
        ("measured", args.measured, 16),
        ("positions", min(args.positions), args.measured + 1),
        ("clients", args.clients, 1),
        ("prompt", args.prompt, 1),
        ("length", args.length, args.prompt + 1),
        ("answer", args.answer, 2),
        ("rates", min(args.rates), 1e-3),
        ("ramp", args.ramp, 0),
        ("seconds", args.seconds, 1),
    ):
        if value < least:
            raise ValueError(f"--{name}={value}: must be >= {least}")
    if args.model is None:
        from vllm_bounded_kv.default_model import ensure_default_model

        args.model = str(ensure_default_model())
    elif not (Path(args.model) / "tokenizer.json").is_file():
        raise ValueError(f"--model={args.model!r}: must be a folder with a tokenizer.json")
    trained = max_positions(args.model)
    if capacity > trained:
        raise ValueError(f"--window={args.window}: sink + window must be <= {trained}")
    default = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    return Work(
        model=args.model,
        bytes_per_token=kv_bytes_per_token(args.model),
        trained=trained,
        sink=args.sink,
        window=args.window,
        positions=tuple(args.positions),
        measured=args.measured,
        clients=args.clients,
        prompt=args.prompt,
        length=args.length,
        answer=args.answer,
        rates=tuple(args.rates),
        ramp=args.ramp,
        seconds=args.seconds,
        ttft_s=args.ttft_s,
        tpot_s=args.tpot_s,
        threads=args.threads or default,
        block_size=args.block_size,
    )


def _records(args: argparse.Namespace, peers: list[str], work: Work) -> Records:
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "records.jsonl"
    if args.fresh:
        path.unlink(missing_ok=True)
    what = {name: f"{PEERS[name].what}; {PEERS[name].dtype}" for name in peers}
    setup = {
        **describe_machine(),
        "threads": work.threads,
        "transformers": _version("transformers"),
        "llama-cpp-python": _version("llama-cpp-python"),
        "peers": what,
        "model": Path(work.model).name,
        **work.shared(),
    }
    return Records(path, setup)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _plan(args: argparse.Namespace, peers: list[str], work: Work) -> list[Cell]:
    """Rounds; in each, every x of every row; there, every peer, the other way round every time.

    One server at a time: in each round, every peer; there, all of its cells.
    """
    points: dict[str, list[float]] = {
        "latency": list(work.positions),
        "closed": [work.clients],
        "open": list(work.rates),
        "memory": [0],
    }
    plan = []
    for number in range(args.rounds):
        order = peers[:: -1 if number % 2 else 1]
        cells = [
            Cell(row, peer, x, work.given(row), number)
            for row in ROWS
            if row in args.rows
            for x in points[row]
            for peer in order
        ]
        if args.one_at_a_time:
            cells.sort(key=lambda cell: order.index(cell.peer))
        plan += cells
    return plan


def _measured(house: House, cell: Cell) -> dict[str, Any]:
    number = cell.round * len(ROWS) + list(ROWS).index(cell.row)
    try:
        measurement = house.measurement(cell.peer, number)
        return asyncio.run(ROWS[cell.row](measurement, cell.x))
    except AskError as error:
        return {"failed": str(error)}


def _report(args: argparse.Namespace, records: Records, plan: list[Cell], work: Work) -> int:
    setup = {**records.setup, "work": {**asdict(work), "model": Path(work.model).name}}
    result = {"setup": setup, "rows": summary(records.of(plan))}
    (args.out / "serve.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(result, args.out / "serve.png")
    print(table(result), end="\n\n")
    for line in failures(result):
        print(line)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
