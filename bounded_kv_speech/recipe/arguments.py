"""Kinds of the recipe's options: what is wrong is refused before anything is made."""

from __future__ import annotations

import argparse
from pathlib import Path


def count(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number >= 1")
    return int(text)


def shard(text: str) -> int:
    """A shard's number, 0 or more."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number >= 0")
    return int(text)


def amount(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a finite number above 0")
    return value


def checkpoint(text: str) -> Path:
    """A file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: is no file; must be a training's .pt")
    return path
