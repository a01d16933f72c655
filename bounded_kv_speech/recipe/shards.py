"""What the teacher says, in shards: files of a folder, each written whole.

A stopped run goes on with the first that is not there. What a shard holds depends on its number
alone, whichever process makes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

Arrays = dict[str, NDArray[Any]]


def make(
    folder: Path,
    hours: float,
    processes: int,
    maker: Callable[[], Callable[[int], tuple[float, Arrays]]],
    first: int = 0,
) -> None:
    """Make shards from number `first` on until they hold `hours` of speech, with those there.

    `maker` is called once in each process; what it returns makes a shard's seconds and arrays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted, done, number = hours * 3600, 0.0, first
    with (
        get_context("spawn").Pool(processes, _begin, (folder, maker)) as pool,
        tqdm(total=round(wanted), unit="s of speech", file=sys.stderr) as bar,
    ):
        while done < wanted:
            numbers = range(number, number + processes)
            done, number = done + sum(pool.map(_shard, numbers)), numbers.stop
            bar.update(round(done) - bar.n)


def load(folder: Path, command: str) -> list[Arrays]:
    """All shards of a folder, in order.

    Raises:
        FileNotFoundError: when there are none; `command` makes them.
    """
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise FileNotFoundError(f"no shards in {folder}; make them with -m {command}")
    return [dict(np.load(path)) for path in tqdm(paths, unit=" shards", file=sys.stderr)]


_folder: Path
_maker: Callable[[], Callable[[int], tuple[float, Arrays]]]
_make: Callable[[int], tuple[float, Arrays]] | None = None


def _begin(folder: Path, maker: Callable[[], Callable[[int], tuple[float, Arrays]]]) -> None:
    """What a process of the pool is given once."""
    global _folder, _maker
    _folder, _maker = folder, maker


def _shard(number: int) -> float:
    """Write a shard, if it is not there; returns the seconds of its speech."""
    global _make
    path = _folder / f"{number:05d}.npz"
    if path.exists():
        return float(json.loads(path.with_suffix(".json").read_text())["seconds"])
    _make = _make or _maker()
    seconds, arrays = _make(number)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its stubs: a flag
    path.with_suffix(".json").write_text(json.dumps({"seconds": seconds}))
    part.rename(path)
    return seconds
