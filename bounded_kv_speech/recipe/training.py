"""What both trainings share: the optimiser, its schedule, and a checkpoint to go on from."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

WARM_UP = 200


class Training:
    """A model's way through its steps; a run that is stopped goes on from its checkpoint."""

    def __init__(self, model: nn.Module, work: Path, name: str, rate: float, steps: int) -> None:
        """Takes up `work`'s checkpoint `name`, if there is one; `rate` is the highest."""
        self._model, self._rate, self._num_steps = model, rate, steps
        self._checkpoint, self._log = checkpoint_of(work, name), work / f"{name}.jsonl"
        self._optimiser = torch.optim.AdamW(
            model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self._done = 0
        self._bar: tqdm[Any] | None = None
        if self._checkpoint.exists():
            saved = torch.load(self._checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            self._optimiser.load_state_dict(saved["optimiser"])
            self._done = int(saved["step"])

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left, under a progress bar."""
        with tqdm(
            total=self._num_steps, initial=self._done, unit=" steps", file=sys.stderr
        ) as self._bar:
            for step in range(self._done, self._num_steps):
                yield step
                self._bar.update()

    def descend(self, step: int, loss: Tensor) -> None:
        """One step of the optimiser."""
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate * schedule(step, self._num_steps)
        self._optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimiser.step()

    def show(self, figures: dict[str, float]) -> None:
        """Beside the bar, with its next line."""
        assert self._bar is not None
        shown = {name: f"{value:.4f}" for name, value in figures.items()}
        self._bar.set_postfix(shown, refresh=False)

    def is_due(self, step: int, every: int) -> bool:
        """Whether a checkpoint is, after `step`: every so many, and at the end."""
        return (step + 1) % every == 0 or step + 1 == self._num_steps

    def save(self, step: int, figures: dict[str, float]) -> None:
        """Write the checkpoint after `step`, and a line of the log."""
        part = self._checkpoint.with_suffix(".part")
        state = {"model": self._model.state_dict(), "optimiser": self._optimiser.state_dict()}
        torch.save({"step": step + 1, **state}, part)
        part.rename(self._checkpoint)
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step + 1, **figures}) + "\n")


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate: a short rise, then a cosine to nearly nothing."""
    rise = min(1.0, (step + 1) / WARM_UP)
    return rise * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def moved_average(average: float | None, value: float) -> float:
    """Over the last fifty or so."""
    return value if average is None else 0.98 * average + 0.02 * value


def checkpoint_of(work: Path, name: str) -> Path:
    """Where a training of this name leaves its model."""
    return work / f"{name}.pt"


def load_trained(model: nn.Module, work: Path, name: str) -> None:
    """Give `model` the weights of `work`'s checkpoint `name`, for use.

    Raises:
        FileNotFoundError: when there is none.
    """
    path = checkpoint_of(work, name)
    if not path.exists():
        command = f"-m {__package__}.train_{name}"
        raise FileNotFoundError(f"no {path.name} in {work}; train it with {command}")
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    model.eval().requires_grad_(False)
