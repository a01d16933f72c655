"""What every peer is given: one model, one policy, one pool, one set of lengths."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

BLOCK = 128
"""vLLM's largest default block on a CPU, of which one is its null block."""
SPARE = 64
"""Tokens beyond the last position."""
SHARED = ("bytes_per_token", "trained", "sink", "window", "clients", "threads", "block_size")
GIVEN = {
    "latency": ("measured",),
    "closed": ("prompt", "length", "ramp", "seconds"),
    "open": ("prompt", "answer", "seconds", "ttft_s", "tpot_s"),
}
"""What all measurements have in common, and what one of a row depends on as well."""


@dataclass(frozen=True)
class Work:
    """Lengths are in tokens."""

    model: str
    bytes_per_token: int
    """Of keys and values, float32."""
    trained: int
    """Positions that the model was trained on."""
    sink: int
    window: int
    positions: tuple[int, ...]
    """Where latency is measured, in one stream alone."""
    measured: int
    """Tokens of which latency is the median, up to a position."""
    clients: int
    """Streams at once under load."""
    prompt: int
    length: int
    """Of a stream in the closed loop, its prompt included."""
    answer: int
    """Tokens of an answer in the open loop."""
    rates: tuple[float, ...]
    """Requests a second in the open loop."""
    ramp: float
    """Seconds before the closed loop is measured: all clients read their first prompts."""
    seconds: float
    """Of each loop, as measured."""
    ttft_s: float
    tpot_s: float
    """What an answer may take to be good."""
    threads: int
    block_size: int | None = None

    def shared(self) -> dict[str, Any]:
        """What must be the same for measurements to stand in one table."""
        everything = asdict(self)
        return {**{name: everything[name] for name in SHARED}, "pool_tokens": self.pool_tokens}

    def given(self, row: str) -> str:
        """What a measurement of this row depends on besides, as text."""
        return ", ".join(f"{name} {getattr(self, name):g}" for name in GIVEN.get(row, ()))

    @property
    def capacity(self) -> int:
        """Entries of a bounded stream."""
        return self.sink + self.window

    @property
    def longest(self) -> int:
        """Any stream's length, and a little."""
        return max(*self.positions, self.length, self.prompt + self.answer) + SPARE

    @property
    def longest_trained(self) -> int:
        """As long as a server may let streams become that keeps the model's positions."""
        return min(self.longest, self.trained)

    @property
    def pool_tokens(self) -> int:
        """The longest stream, or all clients' bounded ones: what every vLLM's pool holds."""
        most = max(self.longest_trained, self.clients * self.capacity)
        return -(-most // BLOCK) * BLOCK

    @property
    def pool_bytes(self) -> int:
        """Of the pool, with its null block."""
        return (self.pool_tokens + BLOCK) * self.bytes_per_token
