"""From frames to sound: pulses and noise, each filtered by its envelope, for many streams at once.

A frame's filter acts about the frame's centre. Between two centres lie `HOP` samples of excitation,
made when the second frame is known; a frame's window spans the excitation on both sides of its
centre, and windows overlap by half and add up to one. So sound is `HOP` samples late, and a stream
may be cut anywhere: what it carries on is its pulses' phase, its last frame and half a window.

Pulse trains: sum of cosines h = 1..H of amplitude 1, `sin((H + 1/2) t) / (2 sin(t / 2)) - 1/2`
(Dirichlet's kernel). Noise is white and uniform, a function of the stream's seed and the sample's
number alone (SplitMix64), so that a stream sounds the same alone and in company.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bounded_kv_speech.frames import (
    HOP,
    MAX_F0,
    MIN_F0,
    NUM_HARMONIC,
    NUM_NOISE,
    NUM_VALUES,
    SAMPLE_RATE,
    Floats,
    from_bands,
)

WINDOW_SIZE = 2 * HOP
HIGHEST = 11_000.0
"""Hz; harmonics above are left out."""
_WINDOW = np.sin(np.pi * (np.arange(WINDOW_SIZE) + 0.5) / WINDOW_SIZE).astype(np.float32)
_HARMONIC, _NOISE = from_bands(NUM_HARMONIC, WINDOW_SIZE), from_bands(NUM_NOISE, WINDOW_SIZE)
_LOUDEST = 3.0
"""Of a log amplitude: what a filter may at most do."""


@dataclass
class Voicing:
    """What a stream carries from one step to the next; a batch of them in arrays."""

    seed: NDArray[np.uint64]
    """`[B]`"""
    frames: NDArray[np.int64]
    """`[B]`: so far."""
    phase: NDArray[np.float64]
    """`[B]`: of the pulses, in cycles."""
    last: NDArray[np.float64]
    """`[B, NUM_VALUES]`: the frame before, as exact as it was: its pitch adds up."""
    pulses: Floats
    """`[B, HOP]`: excitation before the last frame's centre."""
    tail: Floats
    """`[B, HOP]`: second half of the window before."""

    @classmethod
    def begin(cls, seeds: NDArray[np.uint64]) -> Voicing:
        """Streams that have not begun, in silence."""
        size = len(seeds)
        last = np.zeros((size, NUM_VALUES))
        last[:, : NUM_HARMONIC + NUM_NOISE] = -12.0
        return cls(
            seed=seeds.astype(np.uint64),
            frames=np.zeros(size, np.int64),
            phase=np.zeros(size),
            last=last,
            pulses=np.zeros((size, HOP), np.float32),
            tail=np.zeros((size, HOP), np.float32),
        )

    def take(self, rows: NDArray[np.int64]) -> Voicing:
        """A copy of some streams."""
        return Voicing(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def put(self, rows: NDArray[np.int64], other: Voicing) -> None:
        """Write `other`'s streams to `rows`."""
        for name in self.__dataclass_fields__:
            getattr(self, name)[rows] = getattr(other, name)


def synthesise(state: Voicing, frames: Floats) -> Floats:
    """Sound `[B, F * HOP]` of `frames [B, F, NUM_VALUES]`; the state moves on.

    A frame is `NUM_HARMONIC` log amplitudes, `NUM_NOISE` log deviations, log f0 and voicing
    (above 0.5: voiced).
    """
    size, count, _ = frames.shape
    known = np.concatenate([state.last[:, None], frames], axis=1)
    source = _pulses(state, known)
    noise = _noise(state, count)
    # The window about the centre of frame t - 1 spans the excitation before and after it.
    before = np.concatenate([state.pulses[:, None], source[:, :-1]], axis=1)
    pulses = np.concatenate([before, source], axis=2) * _WINDOW
    envelopes = np.minimum(known[:, :-1, : NUM_HARMONIC + NUM_NOISE], _LOUDEST)
    spectrum = np.fft.rfft(pulses) * np.exp(envelopes[..., :NUM_HARMONIC] @ _HARMONIC)
    spectrum += np.fft.rfft(noise * _WINDOW) * np.exp(envelopes[..., NUM_HARMONIC:] @ _NOISE)
    windows = (np.fft.irfft(spectrum, WINDOW_SIZE) * _WINDOW).astype(np.float32)
    tails = np.concatenate([state.tail[:, None], windows[:, :-1, HOP:]], axis=1)
    sound = windows[:, :, :HOP] + tails
    state.last = frames[:, -1].astype(np.float64)
    state.pulses, state.tail = source[:, -1].copy(), windows[:, -1, HOP:].copy()
    state.frames = state.frames + count
    return sound.reshape(size, count * HOP)


def synthesise_at_once(frames: Floats, seed: int = 0) -> Floats:
    """Sound `[F * HOP]` of a whole stream's `frames [F, NUM_VALUES]`."""
    return synthesise(Voicing.begin(np.array([seed], np.uint64)), frames[None])[0]


def _pulses(state: Voicing, known: Floats) -> Floats:
    """Excitation `[B, F, HOP]` between the centres of consecutive frames of `known [B, F + 1]`."""
    f0 = np.clip(np.exp(known[..., -2].astype(np.float64)), MIN_F0, MAX_F0)
    voiced = known[..., -1] > 0.5
    f0 = np.where(voiced, f0, 0)
    first, second = f0[:, :-1], f0[:, 1:]
    first, second = np.where(first > 0, first, second), np.where(second > 0, second, first)
    share = (np.arange(HOP) + 1.0) / HOP
    f = first[..., None] + (second - first)[..., None] * share
    size = len(f)
    cycles = state.phase[:, None] + np.cumsum(f.reshape(size, -1), axis=1) / SAMPLE_RATE
    state.phase = cycles[:, -1] % 1.0
    angle = 2 * np.pi * (cycles % 1.0).reshape(f.shape)
    harmonics = np.floor(HIGHEST / np.maximum(f, MIN_F0)) + 0.5
    below = 2 * np.sin(angle / 2)
    near = np.abs(below) < 2e-3
    train = np.where(near, harmonics, np.sin(harmonics * angle) / np.where(near, 1, below)) - 0.5
    gate = voiced[:, :-1, None] + (voiced[:, 1:, None] * 1.0 - voiced[:, :-1, None]) * share
    return (train * gate).astype(np.float32)


def _noise(state: Voicing, count: int) -> Floats:
    """White noise of deviation 1 under each of the next `count` windows: `[B, F, 2 * HOP]`."""
    first = (state.frames[:, None] + np.arange(count)) * HOP
    number = (first[..., None] + np.arange(WINDOW_SIZE)).astype(np.uint64)
    with np.errstate(over="ignore"):
        z = (number + state.seed[:, None, None]) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    unit = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return (unit - np.float32(0.5)) * np.float32(np.sqrt(12))
