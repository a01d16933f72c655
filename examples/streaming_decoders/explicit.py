"""Attention as a decoder sees it, and its plainest implementation: caches that only grow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_bounded_kv.config import SinkWindow


class Attend(Protocol):
    """Attention of one layer in one step, over what is kept and the step's own; stores too."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, rel_bias: Tensor | None = None
    ) -> Tensor:
        """`q [B * rows, H, T, D]`, `k, v [B * rows, H_kv, T, D]` -> `[B * rows, T, H, D]`.

        `rel_bias [B * rows, H, T, m_max + 2T - 1]` as in `BoundedKVManager.attend`.
        """
        ...


def no_entries(layers: int, rows: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """The `entries` of a stream that begins with nothing, in float64."""
    return [torch.empty(rows, kv_heads, 0, 2 * head_dim, dtype=torch.float64)] * layers


@dataclass
class ExplicitCache:
    """All keys and values that one stream ever had, and a mask that says which still count.

    What the pool must equal, and shares nothing with: no slot, no ring, no plan.
    """

    entries: list[Tensor]
    """`[rows, H_kv, n, 2D]` of each layer, in stream order: keys, then values, in the last axis."""
    retention: SinkWindow
    query_window: int | None = None
    reverse_step_order: bool = False

    @property
    def num_entries(self) -> int:
        """Entries of the stream, source included."""
        return self.entries[0].shape[2]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        span: int,
        rel_bias: Tensor | None = None,
    ) -> Tensor:
        """`Attend` for this stream alone (`B = 1`); `span` of the step's tokens join it."""
        past, own = self.entries[layer], torch.cat([k, v], dim=-1)
        num_past, num_tokens = past.shape[2], own.shape[2]
        everything = torch.cat([past, own], dim=2)
        everything = everything.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        keys, values = everything.chunk(2, dim=-1)
        seen, distance = self._mask(num_past, num_tokens, span)
        scores = q @ keys.mT
        if rel_bias is not None:
            entry = (distance + num_tokens - 1).expand(*scores.shape[:2], -1, -1)
            scores = scores + rel_bias.gather(3, entry)
        scores = (scores / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
        joining = own[:, :, :span]
        if self.reverse_step_order:
            joining = joining.flip(2)
        self.entries[layer] = torch.cat([past, joining], dim=2)
        return (scores.softmax(dim=-1) @ values).transpose(1, 2)

    def _mask(self, num_past: int, num_tokens: int, span: int) -> tuple[Tensor, Tensor]:
        """Which of all keys each query sees, and how far back: `[T, n + T]` both.

        Distances count what is kept only; that of a key which is not kept has no meaning.
        """
        entry, window = torch.arange(num_past), self.retention.window
        if self.retention.window_includes_step:
            window -= span
        kept = (entry < self.retention.sink) | (entry >= num_past - window)
        kept = torch.cat([kept, torch.ones(num_tokens, dtype=torch.bool)])
        order = (kept.cumsum(0) - 1).clamp(min=0)
        distance = order[num_past:, None] - order
        seen = kept.expand(num_tokens, -1)
        if self.query_window is not None:
            seen = seen & (distance >= 0) & (distance <= self.query_window)
        return seen, distance
