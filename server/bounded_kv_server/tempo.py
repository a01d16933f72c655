"""Sound made faster or slower at the same pitch, as it comes: FFmpeg's `atempo`."""

from __future__ import annotations

import math
from fractions import Fraction

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.error import BlockingIOError, EOFError
from av.filter import Graph

from bounded_kv_speech.frames import Floats

MIN_SPEED, MAX_SPEED = 0.25, 4.0
"""OpenAI's limits."""
PIECE_S = 0.005
"""As it is heard."""


class Tempo:
    """A filter graph that plays sound of `rate` Hz `speed` times as fast."""

    def __init__(self, rate: int, speed: float) -> None:
        """Raises ValueError: a speed beyond `MIN_SPEED` and `MAX_SPEED`."""
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise ValueError(f"speed={speed}: must be from {MIN_SPEED} to {MAX_SPEED}")
        self._rate = rate
        self.held_s = 0.35 if speed < 0.5 else 0.12
        """What is held back at most, as it is heard: measured at all rates."""
        self._num_read, self._piece = 0, max(1, round(rate * speed * PIECE_S))
        self._graph = Graph()
        self._graph.threads = 1  # else each stream starts some that have nothing to do
        source = self._graph.add_abuffer(
            sample_rate=rate, format="flt", layout="mono", time_base=Fraction(1, rate)
        )
        # One takes 0.5 at least, and leaves sound out beyond 2.
        stages = [speed] if 0.5 <= speed <= 2.0 else [math.sqrt(speed)] * 2
        filters = [self._graph.add("atempo", f"{stage:.9f}") for stage in stages]
        self._graph.link_nodes(source, *filters, self._graph.add("abuffersink")).configure()

    def feed(self, samples: Floats) -> Floats:
        """What is ready `[M]`, 0 or more, after `samples [N]`, 1 or more."""
        # `atempo` holds back as much as the last piece makes.
        for at in range(0, len(samples), self._piece):
            piece = samples[None, at : at + self._piece]
            frame = AudioFrame.from_ndarray(np.ascontiguousarray(piece), "flt", "mono")
            frame.sample_rate = self._rate
            frame.pts, frame.time_base = self._num_read, Fraction(1, self._rate)
            self._num_read += piece.shape[1]
            self._graph.push(frame)
        return self._ready()

    def finish(self) -> Floats:
        """The rest `[M]`."""
        self._graph.push(None)
        return self._ready()

    def _ready(self) -> Floats:
        ready = [np.zeros(0, np.float32)]
        while True:
            try:
                frame = self._graph.pull()
            except (BlockingIOError, EOFError):  # needs more, or has ended
                return np.concatenate(ready)
            assert isinstance(frame, av.AudioFrame)
            ready.append(np.asarray(frame.to_ndarray()[0], np.float32))
