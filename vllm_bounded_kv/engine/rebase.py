"""Rotary positions of one engine step, and which cached keys must turn with them.

The vectorised twin of `positions`. What is stored obeys one rule between steps: every key of a
stream's ring is rotated as if written in the period of the stream's last token. So a row whose
first token begins a period has its ring turned before anything else happens; a row of several
tokens that runs into a period in mid-step turns what its queries read (see `ranged`), and in the
end what it leaves behind. Keys of the sink never turn: they may be shared.

A stream's tokens are planned once each, in order (or from the first again, after a preemption). An
asynchronous scheduler that runs one token past the end of a session's turn and then goes back
would break that at a period's first token; vLLM has none on CPUs. A rejected draft is planned
again, so no draft goes beyond the period of the token before it (the scheduler cuts it there).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_bounded_kv.engine.rows import Ints, Rows


@dataclass(frozen=True)
class Turn:
    """Cached keys to turn."""

    slots: Ints
    """`[n]` cache slots."""
    by: Ints
    """`[n]` positions to turn each by, negative."""


@dataclass(frozen=True)
class Rebase:
    """What a step needs whose positions have fallen back."""

    positions: Ints
    """`[N]` rotary position of each token."""
    first: Turn | None
    """To turn before anything is written or read."""
    last: Turn | None
    """To turn after everything."""


def num_fallbacks(position: Ints, capacity: Ints, limit: int) -> Ints:
    """`positions.num_fallbacks`, element by element; a padded row's vast capacity gives 0."""
    period = np.maximum(limit - capacity, 1)
    return np.where(position < limit, 0, np.maximum(position - capacity, 0) // period)


def plan_rebase(
    rows: Rows, token_rows: Ints, positions: Ints, is_ranged: NDArray[np.bool_], limit: int
) -> Rebase | None:
    """Plan a step's positions; `None` while every stream is below the limit.

    Args:
        rows: of the batch.
        token_rows: `[N]` row of each token.
        positions: `[N]` stream position of each token.
        is_ranged: `[B]` rows that vLLM's kernel does not serve.
        limit: `L`.
    """
    if not (rows.after > limit).any():
        return None
    capacity, period, before = rows.capacity, limit - rows.capacity, rows.before
    lengths = rows.after - before
    fallen = num_fallbacks(before, capacity, limit)  # at each row's first token
    begins = (lengths > 0) & (before >= limit) & (before - capacity == fallen * period)
    back = (fallen * period)[token_rows]
    last = None
    if (lengths > 1).any():
        back = num_fallbacks(positions, capacity[token_rows], limit) * period[token_rows]
        runs_into = is_ranged & (num_fallbacks(rows.after - 1, capacity, limit) > fallen)
        last = _turn_last(rows, np.flatnonzero(runs_into), period, limit)
    return Rebase(
        positions=positions - back,
        first=_turn_first(rows, np.flatnonzero(begins), period),
        last=last,
    )


def _ring_entries(rows: Rows, which: Ints) -> tuple[Ints, Ints]:
    """Row and compact index of every ring entry of the rows in `which`, whose rings are full."""
    sizes = rows.stored_ring[which]
    owner = np.repeat(which, sizes)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return owner, rows.sink[owner] + within


def _turn_first(rows: Rows, which: Ints, period: Ints) -> Turn | None:
    if not len(which):
        return None
    owner, compact = _ring_entries(rows, which)
    return Turn(rows.slots(owner, compact), -period[owner])


def _turn_last(rows: Rows, which: Ints, period: Ints, limit: int) -> Turn | None:
    if not len(which):
        return None
    owner, compact = _ring_entries(rows, which)
    last = rows.after[owner] - 1
    # The newest position that has this compact index.
    position = last - (last - compact) % rows.stored_ring[owner]
    capacity = rows.capacity[owner]
    # What was there before the step has been turned to the step's first token.
    fallen = num_fallbacks(np.maximum(position, rows.before[owner]), capacity, limit)
    missing = num_fallbacks(last, capacity, limit) - fallen
    stale = np.flatnonzero(missing)
    if not len(stale):
        return None
    by = -missing[stale] * period[owner[stale]]
    return Turn(rows.slots(owner[stale], compact[stale]), by)
