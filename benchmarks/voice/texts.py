"""Sentences written for the evaluation, 4 to 14 words each: no model has learned from them."""

from __future__ import annotations

from pathlib import Path

SENTENCES = Path(__file__).with_name("sentences.txt")


def sentences() -> list[str]:
    """All of them, in an order that is always the same."""
    return SENTENCES.read_text(encoding="utf-8").splitlines()
