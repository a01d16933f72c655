"""From negative log-likelihoods to perplexities by stretches of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
"""Tokens a block of the results."""


def block_sums(nats: NDArray[np.float32]) -> list[float]:
    """Sums over blocks of `BLOCK` tokens.

    Args:
        nats: `[n - 1]`, of the tokens 1 to n - 1: the first token has nothing before it, so the
            first block is one short.

    Returns:
        `ceil(n / BLOCK)` sums in nats.
    """
    all_tokens = np.concatenate([[0.0], nats.astype(np.float64)])
    return [float(s) for s in np.add.reduceat(all_tokens, np.arange(0, len(all_tokens), BLOCK))]


def perplexity(
    sums: Sequence[float], num_tokens: int, first: int = 0, last: int | None = None
) -> float:
    """`exp` of the mean negative log-likelihood of the tokens `[first, last)`, but the first.

    Args:
        sums: of blocks, in nats.
        num_tokens: `n` of the whole text.
        first: a multiple of `BLOCK`.
        last: a multiple of `BLOCK`, or the end; `None`: the end.

    Raises:
        ValueError: when the stretch does not fall on blocks, or is empty.
    """
    last = num_tokens if last is None else last
    on_blocks = first % BLOCK == 0 and (last % BLOCK == 0 or last == num_tokens)
    if not (on_blocks and 0 <= first < last <= num_tokens):
        raise ValueError(
            f"tokens [{first}, {last}) of {num_tokens}: must be whole blocks of {BLOCK}"
        )
    count = last - max(first, 1)
    return math.exp(math.fsum(sums[first // BLOCK : -(-last // BLOCK)]) / count)


def stretches(sums: Sequence[float], num_tokens: int, length: int) -> list[float]:
    """Perplexity of each `length` tokens, a multiple of `BLOCK`; the last may be shorter."""
    return [
        perplexity(sums, num_tokens, first, min(first + length, num_tokens))
        for first in range(0, num_tokens, length)
    ]
