"""Streams through a decoder that sees around each frame, a few frames before it and after.

Such a decoder (convolutions without a cache) is run on windows: a frame's samples are taken where
all that they depend on is inside the window. They are then the same as those of the whole stream
decoded at once, and a stream costs as much at any age.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bounded_kv_server.profile import Floats

Frames = NDArray[np.int64]
"""`[F, codes of a frame]`"""
Decode = Callable[[Frames, int], Floats]
"""Frames, and the number of the first in its stream, to samples `[F * samples of a frame]`."""


class Windowed:
    """One stream."""

    def __init__(self, decode: Decode, back: int, ahead: int) -> None:
        """A frame's samples depend on `back` frames before it and `ahead` after it."""
        self._decode, self._back, self._ahead = decode, back, ahead
        self._kept: list[NDArray[np.int64]] = []
        self._first = 0
        """Number of the first that is kept."""
        self._num_sent = 0

    def feed(self, frames: Frames) -> Floats:
        """Samples that are known after more frames; there may be none."""
        self._kept += list(frames)
        return self._take(self._first + len(self._kept) - self._ahead)

    def finish(self) -> Floats:
        """The rest: nothing comes after."""
        return self._take(self._first + len(self._kept))

    def _take(self, end: int) -> Floats:
        """Samples of the frames up to `end` that have not been sent."""
        count = end - self._num_sent
        if count <= 0:
            return np.zeros(0, np.float32)
        sound = self._decode(np.stack(self._kept), self._first)
        of_frame = len(sound) // len(self._kept)
        at = (self._num_sent - self._first) * of_frame
        taken = sound[at : at + count * of_frame]
        self._num_sent = end
        drop = max(0, end - self._back - self._first)
        del self._kept[:drop]
        self._first += drop
        return taken


def reach(decode: Decode, frame: Frames, most: int) -> tuple[int, int]:
    """How many frames before and after a frame its samples depend on, by trying.

    Args:
        frame: two different frames, `[2, codes]`.
        most: frames that are tried on either side.

    Raises:
        ValueError: it is that many or more.
    """
    same = np.repeat(frame[:1], 2 * most + 1, 0)
    other = same.copy()
    other[most] = frame[1]
    changed = (decode(same, 0) != decode(other, 0)).reshape(2 * most + 1, -1).any(1)
    (where,) = np.nonzero(changed)
    if not len(where) or where[0] == 0 or where[-1] == 2 * most:
        raise ValueError(f"a frame's samples depend on {most} frames or more around it")
    # A frame that changes samples before it is one that those look ahead to.
    return int(where[-1]) - most, most - int(where[0])
