"""Plain float64 attention over a list of everything ever written: the slot-pool oracle.

Contract: no slots, no ring, no plan. A stream is a Python list of entries that only grows; a step
attends to all of it and its own tokens, under a boolean mask that spells out what the retention
keeps. It shares no code with what it judges.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class OracleStream:
    """One request's stream and its retention.

    Entries are `[rows, H_kv, 2D]`, keys in the first half of the last axis, in their own dtype.
    """

    source: Tensor
    """The prefix: `[rows, H_kv, source_len, 2D]`."""
    sink: int
    window: int
    window_includes_step: bool = False
    query_window: int | None = None
    reverse: bool = False
    entries: list[Tensor] = field(default_factory=list)
    """Everything the stream holds, source first, one tensor per entry, never shortened."""

    def __post_init__(self) -> None:
        self.entries.extend(self.source.unbind(dim=2))

    @property
    def source_len(self) -> int:
        return self.source.shape[2]

    @property
    def written(self) -> int:
        return len(self.entries) - self.source_len

    def keeps(self, span: int) -> list[bool]:
        """Which entries of the stream the step may see, in stream order."""
        n = len(self.entries)
        last = self.window
        if self.window_includes_step:
            last = max(self.window - span, 0)
        return [i < self.sink or i >= n - last for i in range(n)]

    def attend(self, q: Tensor, kv: Tensor, span: int, rel_bias: Tensor | None = None) -> Tensor:
        """Float64 output `[rows, T, H, D]` of a step; the stream does not change.

        `q` is `[rows, H, T, D]`, `kv` `[rows, H_kv, T, 2D]`, `rel_bias` `[rows, H, T, >= m+2T-1]`.
        """
        num_heads, num_tokens, head_dim = q.shape[1:]
        everything = torch.cat([*(entry[:, :, None] for entry in self.entries), kv], dim=2)
        by_head = everything.double().repeat_interleave(num_heads // everything.shape[1], dim=1)
        keys, values = by_head.chunk(2, dim=-1)
        mask, distance = self._mask_and_distance(span, num_tokens)
        logits = q.double() @ keys.mT
        if rel_bias is not None:
            query, key = mask.nonzero(as_tuple=True)
            told = rel_bias[:, :, query, distance[query, key] + num_tokens - 1]
            logits[:, :, query, key] += told.double()
        logits[:, :, ~mask] = -math.inf
        weights = torch.softmax(logits * head_dim**-0.5, dim=-1)
        return (weights @ values).transpose(1, 2)

    def join(self, kv: Tensor, span: int) -> None:
        """Append a step's first `span` tokens, last-first when reversed."""
        joining = list(kv.unbind(dim=2)[:span])
        self.entries.extend(reversed(joining) if self.reverse else joining)

    def _mask_and_distance(self, span: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """`[T, n + T]`: who sees whom, and how far apart they are in retained order."""
        kept = self.keeps(span) + [True] * num_tokens
        order = torch.tensor(kept).cumsum(0) - 1  # of no meaning where `kept` is false
        distance = order[-num_tokens:, None] - order[None, :]
        mask = torch.tensor(kept).repeat(num_tokens, 1)
        if self.query_window is not None:
            mask &= (distance >= 0) & (distance <= self.query_window)
        return mask, distance


def expected_slot(
    stream: OracleStream, slot: Tensor, kv: Tensor, span: int, sink_capacity: int
) -> Tensor:
    """A slot after a step, its tokens stored one at a time in stream order.

    `slot` is `[rows, H_kv, slot_tokens, 2D]` before the step, `stream` stands before it too. Later
    tokens overwrite earlier ones, so this needs no notion of what a step may leave unwritten.
    """
    after = slot.clone()
    n = len(stream.entries)
    for i in range(n, n + span):
        token = n + span - 1 - i if stream.reverse else i - n
        if i < stream.sink:
            after[:, :, i - stream.source_len] = kv[:, :, token]
        elif stream.window > 0:
            after[:, :, sink_capacity + (i - stream.sink) % stream.window] = kv[:, :, token]
    return after
