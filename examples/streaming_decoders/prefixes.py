"""Source prefixes: what was computed once and is read by many streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Prefix = list[Tensor]
"""Keys and values of one prefix: `[rows, H_kv, source_len, 2D]` of each layer, in stream order.

An `ExplicitCache` that has read a prompt, and nothing else, holds them as its `entries`."""


def prefix_len(prefix: Prefix) -> int:
    """Its `source_len`."""
    return prefix[0].shape[2]


def stack_prefixes(prefixes: Sequence[Prefix]) -> list[Tensor]:
    """`[num_sources, rows, H_kv, L, 2D]` of each layer, `L` being the longest prefix.

    Shorter ones are followed by NaN, which would show at once if anything read it.
    """
    longest = max(prefix_len(prefix) for prefix in prefixes)
    stacked = []
    for layer in zip(*prefixes, strict=True):
        rows, heads, _, width = layer[0].shape
        storage = layer[0].new_full((len(layer), rows, heads, longest, width), torch.nan)
        for place, entries in zip(storage, layer, strict=True):
            place[:, :, : entries.shape[2]] = entries
        stacked.append(storage)
    return stacked
