"""What has been measured, one JSON line each, so that a stopped run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

Record = dict[str, Any]
LABELS = ("row", "peer", "x", "given", "round")


@dataclass(frozen=True)
class Cell:
    """One measurement to make."""

    row: str
    peer: str
    x: float
    """Position, clients or rate."""
    given: str
    """What it depends on besides: `Work.given`."""
    round: int


class Records:
    """A file whose first line says what must be the same for all others.

    Args:
        path: of the file; it is written as records are added.
        setup: machine, versions and work.

    Raises:
        ValueError: when the file holds another setup's records: naming the first difference.
    """

    def __init__(self, path: Path, setup: dict[str, Any]) -> None:
        self.path, self.setup = path, json.loads(json.dumps(setup))
        self.all: list[Record] = []
        if path.exists():
            first, *lines = path.read_text(encoding="utf-8").splitlines()
            self._check(json.loads(first))
            self.all = [json.loads(line) for line in lines]
        else:
            self._append(self.setup)

    def _check(self, found: dict[str, Any]) -> None:
        for key in {**self.setup, **found}:
            if found.get(key) != self.setup.get(key):
                raise ValueError(
                    f"--out={self.path.parent}: its records are of {key}={found.get(key)!r}, not "
                    f"{self.setup.get(key)!r}; give --fresh to replace them, or another folder"
                )

    def has(self, cell: Cell) -> bool:
        """Whether it was measured, or has failed."""
        return any(_cell(record) == cell for record in self.all)

    def of(self, cells: Iterable[Cell]) -> list[Record]:
        """The records of these cells."""
        wanted = set(cells)
        return [record for record in self.all if _cell(record) in wanted]

    def add(self, cell: Cell, figures: dict[str, Any]) -> Record:
        """Keep what was measured."""
        record = {**vars(cell), **figures}
        self.all.append(record)
        self._append(record)
        return record

    def _append(self, line: Record) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _cell(record: Record) -> Cell:
    return Cell(*(record[name] for name in LABELS))


def summary(records: Iterable[Record]) -> list[Record]:
    """One entry for each row, peer and x: each figure's median, least and most over the rounds.

    A cell that failed in every round has `failed`: why; otherwise the failures are not counted.
    `records` are of one setting a row.
    """
    groups: dict[tuple[str, str, float], list[Record]] = {}
    for record in records:
        groups.setdefault((record["row"], record["peer"], record["x"]), []).append(record)
    result = []
    for (row, peer, x), group in groups.items():
        entry: Record = {"row": row, "peer": peer, "x": x, "given": group[0]["given"]}
        well = [record for record in group if "failed" not in record]
        entry["rounds"] = len(well)
        if not well:
            entry["failed"] = group[0]["failed"]
        for name in dict.fromkeys(key for record in well for key in record if key not in LABELS):
            values = [r[name] for r in well if r.get(name) is not None]
            if values:
                entry[name] = [_round(v) for v in (median(values), min(values), max(values))]
        result.append(entry)
    return result


def _round(value: float) -> float:
    return float(f"{value:.4g}") if value < 1e6 else round(value)
