"""Where the reference stands in a text, so that a run of hours that was stopped goes on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EVERY = 16_384
"""Tokens between two checkpoints: two minutes of the default model on one core."""


@dataclass(frozen=True)
class Checkpoint:
    """One file, for one text read in one way."""

    path: Path
    key: str
    """What the file must be of, to go on with it."""

    @classmethod
    def of(cls, path: Path, tokens: Sequence[int], *what: Any) -> Checkpoint:
        """For these tokens and all else that changes what is computed."""
        text = repr((torch.__version__, what)).encode() + torch.tensor(tokens).numpy().tobytes()
        return cls(path, hashlib.sha256(text).hexdigest())

    def load(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]] | None:
        """What was scored, and the caches behind it; `None` without a file of this key."""
        if not self.path.exists():
            return None
        found = torch.load(self.path, weights_only=True)
        return (found["scored"], found["caches"]) if found["key"] == self.key else None

    def save(self, scored: Tensor, caches: list[tuple[Tensor, Tensor]]) -> None:
        """Replace the file, or leave the last one whole."""
        partial = self.path.with_suffix(".partial")
        torch.save({"key": self.key, "scored": scored.clone(), "caches": caches}, partial)
        os.replace(partial, self.path)

    def remove(self) -> None:
        """When the text has been read."""
        self.path.unlink(missing_ok=True)
