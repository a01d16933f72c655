"""Streams through decoders that keep nothing between calls, and through those that do.

A decoder of convolutions sees some frames before and after each. It is run on windows: what comes
of a frame is taken where all that it depends on is inside the window. That is then the same as of
the whole stream at once, and a stream costs as much at any age.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Frames = NDArray[Any]
"""`[F, ...]`: codes, or what has been made of them."""
Decode = Callable[[Frames, int], Frames]
"""Frames, and the number of the first in its stream, to `[F * n, ...]`: `n` for each frame."""
_NOTHING: Frames = np.zeros(0, np.float32)


class Stage(Protocol):
    """One stream through a part of a decoder."""

    def feed(self, frames: Frames) -> Frames:
        """What is known after more frames; there may be nothing."""
        ...

    def finish(self) -> Frames:
        """The rest: nothing comes after."""
        ...


@dataclass(frozen=True)
class Reach:
    """What a decoder sees around a frame."""

    back: int
    """Frames before it."""
    ahead: int
    """Frames after it."""
    start: int
    """Frames that there must be before the first is known: what pads a beginning may reflect it."""

    @classmethod
    def of(cls, decode: Decode, two: Frames, most: int) -> Reach:
        """By trying.

        Args:
            two: different frames, `[2, ...]`.
            most: frames that are tried on either side.

        Raises:
            ValueError: it is that many or more.
        """
        same = np.repeat(two[:1], 2 * most + 1, 0)
        whole = decode(same, 0).reshape(len(same), -1)

        def changed(at: int) -> NDArray[np.intp]:
            other = same.copy()
            other[at] = two[1]
            return np.flatnonzero((decode(other, 0).reshape(len(same), -1) != whole).any(1))

        middle = changed(most)
        if not len(middle) or middle[0] == 0 or middle[-1] == 2 * most:
            raise ValueError(f"what comes of a frame depends on {most} frames or more around it")
        ahead = most - int(middle[0])
        early = [at + 1 for at in range(most) if (at - changed(at) > ahead).any()]
        return cls(int(middle[-1]) - most, ahead, max(early, default=1))


class Windowed:
    """A stage that is run on windows."""

    def __init__(self, decode: Decode, reach: Reach) -> None:
        self._decode, self._reach = decode, reach
        self._kept: list[NDArray[Any]] = []
        self._first = 0
        """Number of the first that is kept."""
        self._num_sent = 0

    def feed(self, frames: Frames) -> Frames:
        """See `Stage`."""
        self._kept += list(frames)
        known = self._first + len(self._kept)
        return self._take(known - self._reach.ahead if known >= self._reach.start else 0)

    def finish(self) -> Frames:
        """See `Stage`."""
        return self._take(self._first + len(self._kept))

    def _take(self, end: int) -> Frames:
        """What comes of the frames up to `end` that have not been sent."""
        count = end - self._num_sent
        if count <= 0:
            return _NOTHING
        found = self._decode(np.stack(self._kept), self._first)
        each = len(found) // len(self._kept)
        at = (self._num_sent - self._first) * each
        self._num_sent = end
        drop = max(0, end - self._reach.back - self._first)
        del self._kept[:drop]
        self._first += drop
        return found[at : at + count * each]


class Recurrent:
    """A stage with a state: `step(frames, state)` gives what comes of them, and the next state."""

    def __init__(self, step: Callable[[Frames, Any], tuple[Frames, Any]]) -> None:
        self._step, self._state = step, None

    def feed(self, frames: Frames) -> Frames:
        """See `Stage`."""
        if not len(frames):
            return _NOTHING
        found, self._state = self._step(frames, self._state)
        return found

    def finish(self) -> Frames:
        """Nothing is held back."""
        return _NOTHING


class Chain:
    """Stages, each fed with what the one before it has made."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def feed(self, frames: Frames) -> Frames:
        """See `Stage`."""
        for stage in self._stages:
            frames = stage.feed(frames)
        return frames

    def finish(self) -> Frames:
        """See `Stage`."""
        rest = _NOTHING
        for stage in self._stages:
            parts = [stage.feed(rest), stage.finish()]
            rest = np.concatenate([part for part in parts if len(part)] or [_NOTHING])
        return rest
