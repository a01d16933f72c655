"""Prompts that are real text and share no beginning, so that no prefix cache helps."""

from __future__ import annotations

from benchmarks.quality.text import load_text

TEXT_TOKENS = 100_000
STRIDE = 7919
"""A prime far from every length asked for."""


class Prompts:
    """Pieces of one text, the same for the same numbers.

    Args:
        model: folder with a `tokenizer.json`.
    """

    def __init__(self, model: str) -> None:
        self._ids = load_text("topics", model, TEXT_TOKENS).ids
        self._next = 0

    def begin(self, number: int) -> None:
        """Go to where a measurement of this number starts, so that all peers get the same."""
        self._next = number * 1000

    def take(self, num_tokens: int) -> list[int]:
        """The next prompt, `num_tokens` long."""
        self._next += 1
        start = self._next * STRIDE % len(self._ids)
        twice = self._ids[start:] + self._ids
        while len(twice) < num_tokens:
            twice += self._ids
        return twice[:num_tokens]
