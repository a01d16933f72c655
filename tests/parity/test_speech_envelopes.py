"""Frames read off a sound sound as it does."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.voice.sound import pitches
from bounded_kv_speech.frames import HOP, NUM_HARMONIC, NUM_NOISE, NUM_VALUES, Floats, spectra
from bounded_kv_speech.recipe import envelopes as reading
from bounded_kv_speech.recipe.envelopes import envelopes
from bounded_kv_speech.recipe.teacher import Teacher, Utterance, Voice
from bounded_kv_speech.synth import synthesise_at_once

WINDOW = np.hanning(601)[:-1].astype(np.float32)
NUM_FRAMES = 160


def some_frames() -> Floats:
    """Two seconds of a voice that moves, a fifth of it unvoiced."""
    rng = np.random.default_rng(1)
    time, frames = np.arange(NUM_FRAMES) / 80, np.zeros((NUM_FRAMES, NUM_VALUES), np.float32)
    for part, count, level in (
        (slice(0, NUM_HARMONIC), NUM_HARMONIC, -4.5),
        (slice(NUM_HARMONIC, -2), NUM_NOISE, -7.0),
    ):
        band = np.arange(count) / count
        moves = 1.2 * np.cos(2 * np.pi * (3 * band + rng.random() + 0.9 * time[:, None]))
        frames[:, part] = level - 2 * band + moves
    frames[:, -2] = np.log(140) + 0.2 * np.sin(2 * np.pi * 1.3 * time)
    frames[:, -1] = np.arange(NUM_FRAMES) % 50 < 40
    return frames


def sound_of(frames: Floats) -> Floats:
    return synthesise_at_once(frames)[HOP:]


def distance(a: Floats, b: Floats) -> float:
    """Mean difference of two sounds' spectra, smoothed over 200 Hz, in nepers."""
    smooth = np.ones(5) / 5
    logs = []
    for samples in (a, b):
        power = np.square(np.abs(spectra(samples, WINDOW)))
        power = np.apply_along_axis(np.convolve, 1, power, smooth, mode="same")
        logs.append(0.5 * np.log(power + 1e-6))
    count = min(map(len, logs))
    return float(np.abs(logs[0][:count] - logs[1][:count]).mean())


def test_a_sound_is_made_again_from_its_frames() -> None:
    frames = some_frames()
    flat, hushed, still = frames.copy(), frames.copy(), frames.copy()
    flat[:, :NUM_HARMONIC], flat[:, NUM_HARMONIC:-2] = 0.0, -12.0
    hushed[:, NUM_HARMONIC:-2], still[:, :NUM_HARMONIC] = -12.0, -12.0
    f0 = np.where(frames[:, -1] > 0.5, np.exp(frames[:, -2]), 0.0).astype(np.float32)
    said = Utterance(
        sound_of(hushed), sound_of(still), sound_of(flat), f0, "", np.zeros(0, np.float64)
    )
    again = distance(said.samples, sound_of(envelopes(said)))
    assert again < 0.1
    assert again < 0.8 * distance(said.samples, sound_of(reading._read(said)))


@pytest.mark.parametrize("pitch", [0.65, 0.8, 1.0])
def test_what_is_voiced_stays_voiced(pitch: float) -> None:
    """In low voices too, where more than one harmonic is in the bins that share a gain."""
    teacher = Teacher()
    (phonemes,) = teacher.phonemes("A yellow moon was low above the narrow road.")
    said = teacher.say(phonemes, Voice(pitch), seed=0)
    periodic = [
        np.mean(pitches(samples) > 0)
        for samples in (said.samples, synthesise_at_once(envelopes(said)))
    ]
    assert periodic[1] > 0.8 * periodic[0] > 0.1
