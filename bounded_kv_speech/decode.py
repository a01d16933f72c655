"""Codes in, sound out: streams of the codec, each in a slot of its own, however long they last.

The decoder computes in float64. A pitch that differs in the last bits of float32, as it does from
one size of batch to another, would put a stream's pulses out of phase in minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bounded_kv_speech import fsq
from bounded_kv_speech.codec import QUERY_WINDOW, Decoder, attend_at_once
from bounded_kv_speech.frames import FRAMES_PER_CODE, Floats
from bounded_kv_speech.synth import Voicing, synthesise
from vllm_bounded_kv import (
    BoundedKVConfig,
    BoundedKVSpec,
    BoundedKVStep,
    SinkWindow,
    StreamPosition,
)
from vllm_bounded_kv.manager import BoundedKVManager


class StreamingDecoder:
    """Up to `max_streams` streams, decoded in batches, a code or more at a time."""

    def __init__(self, decoder: Decoder, max_streams: int) -> None:
        """Memory for all of them is taken here."""
        self.decoder = decoder.double().eval().requires_grad_(False)
        config = decoder.config
        spec = BoundedKVSpec(
            BoundedKVConfig(
                num_layers=config.decoder_layers,
                num_heads=config.heads,
                head_dim=config.head_dim,
                rows_per_request=1,
                max_source_len=0,
                retention=SinkWindow(sink=0, window=QUERY_WINDOW),
                query_window=QUERY_WINDOW,
                max_slots=max_streams,
                dtype=torch.float64,
            )
        )
        self._manager = BoundedKVManager.build(spec)
        self._voicing = Voicing.begin(np.zeros(max_streams, np.uint64))
        self._positions: dict[str, StreamPosition] = {}
        self._seeds: dict[str, int] = {}

    def open(self, name: str, seed: int = 0) -> None:
        """Begin a stream, whose noise is that of `seed`. It gets its slot with its first code.

        Raises:
            ValueError: there is a stream of this name.
        """
        if name in self._positions:
            raise ValueError(f"stream {name!r} is open already")
        self._positions[name] = StreamPosition(0, 0)
        self._seeds[name] = seed

    def close(self, name: str) -> None:
        """End a stream, and give its slot to another; of no effect if there is none."""
        self._positions.pop(name, None)
        self._seeds.pop(name, None)
        self._manager.release(name)

    @torch.no_grad()
    def step(self, codes: Mapping[str, Sequence[int]]) -> dict[str, Floats]:
        """The next codes of some streams, one or more of each, to `[CODE_SAMPLES * n]` samples.

        Raises:
            KeyError: a stream that is not open.
            ValueError: a code that is none.
            RuntimeError: more streams than there are slots.
        """
        if not codes:
            return {}
        given = {name: _checked(name, values) for name, values in codes.items()}
        segments = [(name, len(values)) for name, values in given.items()]
        step = BoundedKVStep(segments, {name: self._positions[name] for name in given})
        before = {name for name in given if self._manager.slot_of(name) is not None}
        if refusals := self._manager.admit(step):
            for name in given.keys() - before:
                self._manager.release(name)
            raise RuntimeError(refusals[0].message)
        plan = self._manager.plan(step)
        counts = np.array([count for _, count in segments])
        padded = torch.zeros(len(segments), int(counts.max()), dtype=torch.long)
        for row, values in enumerate(given.values()):
            padded[row, : len(values)] = values
        starts = torch.tensor([self._positions[name].num_entries for name in given])
        positions = starts[:, None] + torch.arange(padded.shape[1])
        attend = partial(self._manager.attend, plan=plan)
        frames = self.decoder(fsq.to_points(padded).double(), positions, attend).numpy()
        self._manager.commit(step)
        slots = np.array([self._manager.slot_of(name) for name in given])
        fresh = [i for i, name in enumerate(given) if name not in before]
        seeds = [self._seeds[name] for name in given]
        self._voicing.put(slots[fresh], Voicing.begin(np.array(seeds, np.uint64)[fresh]))
        for name, count in segments:
            position = self._positions[name]
            self._positions[name] = replace(position, written=position.written + count)
        return self._sound(list(given), slots, counts, frames)

    def _sound(
        self, names: list[str], slots: np.ndarray, counts: np.ndarray, frames: np.ndarray
    ) -> dict[str, Floats]:
        """Streams with as many codes as each other go together; mostly that is all of them."""
        sound: dict[str, Floats] = {}
        for count in np.unique(counts):
            (rows,) = np.nonzero(counts == count)
            state = self._voicing.take(slots[rows])
            samples = synthesise(state, frames[rows, : count * FRAMES_PER_CODE])
            self._voicing.put(slots[rows], state)
            sound |= {names[row]: samples[i] for i, row in enumerate(rows)}
        return sound


def _checked(name: str, values: Sequence[int]) -> Tensor:
    codes = torch.as_tensor(values, dtype=torch.long)
    if codes.dim() != 1 or not len(codes):
        raise ValueError(f"stream {name!r}: codes must be a sequence of one or more")
    if codes.min() < 0 or codes.max() >= fsq.NUM_CODES:
        raise ValueError(
            f"stream {name!r}: codes must be in [0, {fsq.NUM_CODES}), "
            f"got {int(codes.min())} to {int(codes.max())}"
        )
    return codes


@torch.no_grad()
def decode_at_once(decoder: Decoder, codes: Sequence[int], seed: int = 0) -> Floats:
    """A whole stream's sound, without a cache."""
    points = fsq.to_points(_checked("codes", codes))[None].double()
    positions = torch.arange(points.shape[1])[None]
    frames = decoder.double()(points, positions, attend_at_once).numpy()
    return synthesise(Voicing.begin(np.array([seed], np.uint64)), frames)[0]
