"""Rotary positions of a stream that does not end.

Keys are stored with the rotation of the position they were written at, and a model knows only so
many positions. So a stream of capacity `B = sink + ring` turns, at stream position `p`, by

    v(p) = p                            while p < L
    v(p) = B + (p - B) mod (L - B)      after that

where `L` is the server's position limit. Each time `v` falls back, by the period `L - B`, the
ring's keys are turned back by as much: all distances inside the window stay true, and the distance
to the sink stays below `L`.

Source: the contract's "Positions". StreamingLLM (Xiao et al., 2023) counts positions inside the
cache at every token; this does so once a period. Imports no vLLM.
"""

from __future__ import annotations

LIMIT_IN_CAPACITIES = 4
"""The default `L`, in capacities of the largest stream."""


def num_fallbacks(position: int, capacity: int, limit: int) -> int:
    """How often `v` has fallen back up to and including `position`.

    Args:
        position: stream position, >= 0.
        capacity: `B`, below `limit`.
        limit: `L`.
    """
    return 0 if position < limit else (position - capacity) // (limit - capacity)


def next_fallback(position: int, capacity: int, limit: int) -> int:
    """The first position, from `position` on, at which `v` falls back; arguments as above."""
    period = limit - capacity
    return limit + max(0, -(-(position - limit) // period)) * period


def rotary_position(position: int, capacity: int, limit: int) -> int:
    """`v(position)`, in `[0, limit)`; arguments as for `num_fallbacks`."""
    return position - num_fallbacks(position, capacity, limit) * (limit - capacity)
