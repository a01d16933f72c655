"""Tokens in, sound out: streams of the codec, each in a slot of its own, however long they last.

Of the language model's tokens, codes sound; the others mark them (`tokens.py`).

The decoder computes in float64. A pitch that differs in the last bits of float32, as it does from
one size of batch to another, would put a stream's pulses out of phase in minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from bounded_kv_speech import fsq
from bounded_kv_speech.codec import QUERY_WINDOW, Decoder, attend_at_once
from bounded_kv_speech.frames import FRAMES_PER_CODE, Floats
from bounded_kv_speech.synth import Voicing, synthesise, synthesise_at_once
from bounded_kv_speech.tokens import FIRST_CODE, VOCAB_SIZE, VOICE, marks
from vllm_bounded_kv import (
    BoundedKVConfig,
    BoundedKVSpec,
    BoundedKVStep,
    SinkWindow,
    StreamPosition,
)
from vllm_bounded_kv.manager import BoundedKVManager


@dataclass
class _Open:
    """A stream: how far it is, the mark of its next code, and what its noise is made from."""

    position: StreamPosition
    mark: int
    seed: int


@dataclass(frozen=True)
class _Said:
    """What a step's tokens come to: codes `[N]` with their marks `[N]`, and the mark after them."""

    codes: np.ndarray
    marks: np.ndarray
    last: int


class StreamingDecoder:
    """Up to `max_streams` streams, decoded in batches, a code or more at a time."""

    def __init__(self, decoder: Decoder, max_streams: int) -> None:
        """Memory for all of them is taken here."""
        self.decoder, self.max_streams = decoder.double().eval().requires_grad_(False), max_streams
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
        self._open: dict[str, _Open] = {}

    @property
    def num_open(self) -> int:
        """Streams that are open, with a slot or without one yet."""
        return len(self._open)

    def open(self, name: str, seed: int = 0) -> None:
        """Begin a stream, whose noise is that of `seed`. It gets its slot with its first code.

        Raises:
            ValueError: there is a stream of this name.
        """
        if name in self._open:
            raise ValueError(f"stream {name!r} is open already")
        self._open[name] = _Open(StreamPosition(0, 0), VOICE, seed)

    def close(self, name: str) -> None:
        """End a stream, and give its slot to another; of no effect if there is none."""
        self._open.pop(name, None)
        self._manager.release(name)

    @torch.no_grad()
    def step(self, tokens: Mapping[str, Sequence[int]]) -> dict[str, Floats]:
        """The next tokens of some streams to samples: `CODE_SAMPLES` of each code among them.

        Streams without a code among their tokens are left out.

        Raises:
            KeyError: a stream that is not open.
            ValueError: a token that is none.
            RuntimeError: more streams than there are slots.
        """
        everything = {
            name: _read(name, given, self._open[name].mark) for name, given in tokens.items()
        }
        said = {name: each for name, each in everything.items() if len(each.codes)}
        sound = self._decode(said) if said else {}
        for name, each in everything.items():
            self._open[name].mark = each.last
        return sound

    def _decode(self, said: Mapping[str, _Said]) -> dict[str, Floats]:
        segments = [(name, len(each.codes)) for name, each in said.items()]
        step = BoundedKVStep(segments, {name: self._open[name].position for name in said})
        before = {name for name in said if self._manager.slot_of(name) is not None}
        if refusals := self._manager.admit(step):
            for name in said.keys() - before:
                self._manager.release(name)
            raise RuntimeError(refusals[0].message)
        plan = self._manager.plan(step)
        counts = np.array([count for _, count in segments])
        codes, marked = (np.zeros((len(segments), counts.max()), np.int64) for _ in range(2))
        for row, each in enumerate(said.values()):
            codes[row, : len(each.codes)], marked[row, : len(each.codes)] = each.codes, each.marks
        starts = torch.tensor([self._open[name].position.num_entries for name in said])
        frames = self.decoder(
            fsq.to_points(torch.from_numpy(codes)).double(),
            torch.from_numpy(marked),
            starts[:, None] + torch.arange(codes.shape[1]),
            partial(self._manager.attend, plan=plan),
        ).numpy()
        self._manager.commit(step)
        slots = np.array([self._manager.slot_of(name) for name in said])
        fresh = [i for i, name in enumerate(said) if name not in before]
        seeds = [self._open[name].seed for name in said]
        self._voicing.put(slots[fresh], Voicing.begin(np.array(seeds, np.uint64)[fresh]))
        for name, count in segments:
            stream = self._open[name]
            stream.position = replace(stream.position, written=stream.position.written + count)
        return self._sound(list(said), slots, counts, frames)

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


def _read(name: str, tokens: Sequence[int], mark: int) -> _Said:
    ids = np.asarray(tokens, np.int64)
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"stream {name!r}: tokens must be a sequence of one or more")
    if ids.min() < 0 or ids.max() >= VOCAB_SIZE:
        raise ValueError(
            f"stream {name!r}: tokens must be in [0, {VOCAB_SIZE}), "
            f"got {int(ids.min())} to {int(ids.max())}"
        )
    marked, sounds = marks(ids, mark), ids >= FIRST_CODE
    return _Said(ids[sounds] - FIRST_CODE, marked[sounds], int(marked[-1]))


@torch.no_grad()
def decode_at_once(decoder: Decoder, tokens: Sequence[int], seed: int = 0) -> Floats:
    """A whole stream's sound, without a cache."""
    said = _read("tokens", tokens, VOICE)
    codes = torch.from_numpy(said.codes)[None]
    positions = torch.arange(codes.shape[1])[None]
    points = fsq.to_points(codes).double()
    marked = torch.from_numpy(said.marks)[None]
    frames = decoder.double()(points, marked, positions, attend_at_once).numpy()
    return synthesise_at_once(frames[0], seed)
