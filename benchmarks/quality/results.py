"""What has been measured so far, in one JSON file that is written anew after every scheme."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.perplexity import block_sums, perplexity
from benchmarks.quality.schemes import KINDS, STREAMING, Scheme

LAST = 16_384
"""Tokens at the end, where drift would show."""


class Results:
    """`setup` says what the text, the model and the software are; `schemes` what they gave.

    A scheme's entry holds its settings, `tokens`, `seconds`, what the caller adds, and
    `nats_per_1024`: the sums of negative log-likelihoods of each 1,024 tokens.
    """

    def __init__(self, path: Path, setup: dict[str, Any], schemes: dict[str, Any]) -> None:
        self.path = path
        self.setup = setup
        self.schemes = schemes

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file that `add` has written."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, content["setup"], content["schemes"])

    @classmethod
    def resume(cls, path: Path, setup: dict[str, Any]) -> Results:
        """Go on with the file, if it is there.

        Raises:
            ValueError: when it holds another setup's results: naming the first difference.
        """
        if not path.exists():
            return cls(path, setup, {})
        found = cls.load(path)
        for key in {**setup, **found.setup}:
            if setup.get(key) != found.setup.get(key):
                raise ValueError(
                    f"--out={path.parent}: its results are of {key}={found.setup.get(key)!r}, not "
                    f"{setup.get(key)!r}; give --fresh to replace them, or another folder"
                )
        return found

    def has(self, scheme: Scheme) -> bool:
        """Whether the scheme has been measured."""
        return str(scheme) in self.schemes

    def add(self, scheme: Scheme, nats: NDArray[np.float32], seconds: float, **more: Any) -> None:
        """Keep a scheme's `[n - 1]` negative log-likelihoods, and write the file."""
        sums = block_sums(nats)
        self.schemes[str(scheme)] = {
            "kind": scheme.kind,
            "sink": scheme.sink,
            "window": scheme.window,
            "limit": scheme.limit,
            "tokens": len(nats) + 1,
            "seconds": round(seconds, 1),
            **more,
            "perplexity": round(perplexity(sums, len(nats) + 1), 4),
            "nats_per_1024": [round(s, 4) for s in sums],
        }
        self.schemes = dict(sorted(self.schemes.items(), key=lambda item: _place(item[1])))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(self._to_json(), encoding="utf-8")
        os.replace(partial, self.path)

    def perplexity(self, name: str, first: int = 0, last: int | None = None) -> float | None:
        """Of the tokens `[first, last)`, whole blocks; `None` where the scheme read fewer."""
        entry = self.schemes[name]
        last = entry["tokens"] if last is None else last
        if last > entry["tokens"]:
            return None
        return perplexity(entry["nats_per_1024"], entry["tokens"], first, last)

    def reference_of(self, name: str) -> str | None:
        """The name of StreamingLLM's entry of the same sizes, if it was measured."""
        entry = self.schemes[name]
        reference = str(Scheme(STREAMING, entry["sink"], entry["window"]))
        return reference if entry["sink"] and reference in self.schemes else None

    def ratio(self, name: str, first: int = 0, last: int | None = None) -> float | None:
        """Perplexity over StreamingLLM's of the same sizes and stretch; `None` without one."""
        reference = self.reference_of(name)
        if reference is None:
            return None
        own, its = (self.perplexity(each, first, last) for each in (name, reference))
        return own / its if own and its else None

    def summary(self) -> dict[str, Any]:
        """Setup, and of each scheme what matters most: overall and over the last `LAST` tokens."""
        total = self.setup["tokens"]
        late = max(0, total - LAST) // 1024 * 1024
        return {
            "setup": self.setup,
            "schemes": {
                name: {
                    "tokens": entry["tokens"],
                    "perplexity": entry["perplexity"],
                    f"perplexity_last_{total - late}": _rounded(self.perplexity(name, late, total)),
                    "over_streaming": _rounded(self.ratio(name)),
                    f"over_streaming_last_{total - late}": _rounded(self.ratio(name, late, total)),
                }
                for name, entry in self.schemes.items()
            },
        }

    def _to_json(self) -> str:
        """One line an entry: lists of numbers do not read well one a line."""
        entries = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in self.schemes.items()
        )
        return f'{{"setup": {json.dumps(self.setup)},\n"schemes": {{\n{entries}\n}}}}\n'


def _place(entry: dict[str, Any]) -> tuple[int, int, int]:
    """Where an entry stands in tables, whatever the order it was measured in."""
    return KINDS.index(entry["kind"]), entry["sink"], entry["limit"] or 0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
