"""What the voice's evaluation reads off sound: pitch and likeness, where the truth is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.voice.sound import Likeness, Scale, pitches
from bounded_kv_speech.frames import HOP, NUM_HARMONIC, NUM_VALUES, SAMPLE_RATE, band_centres
from bounded_kv_speech.synth import synthesise_at_once
from bounded_kv_speech.wav import WavFile, read_wav

SECONDS = 1.0


def sound(f0: np.ndarray, formant: float = 500.0) -> np.ndarray:
    """Pulses of pitches `f0 [F]` through one formant, and a little noise."""
    frames = np.zeros((len(f0), NUM_VALUES), np.float32)
    octaves = np.log2(np.maximum(band_centres(NUM_HARMONIC), 50) / formant)
    frames[:, :NUM_HARMONIC] = -4.0 - np.square(octaves)
    frames[:, NUM_HARMONIC:-2] = -8.0
    frames[:, -2], frames[:, -1] = np.log(f0), 1.0
    return synthesise_at_once(frames)


@pytest.mark.parametrize("hz", [85.0, 120.0, 190.0, 260.0])
def test_pitch_that_glides_is_followed(hz: float) -> None:
    f0 = hz * np.exp2(np.linspace(-0.15, 0.15, int(SECONDS * SAMPLE_RATE / HOP)))
    found = pitches(sound(f0))
    # Sound is a hop late, and its first and last frames are half silence.
    error = np.log2(found[4:-4] / f0[3:-5])
    assert np.abs(error).max() < 0.03
    assert abs(np.median(error)) < 0.005


def test_noise_and_silence_have_no_pitch() -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, SAMPLE_RATE).astype(np.float32)
    assert np.mean(pitches(noise) > 0) < 0.02
    assert not pitches(np.zeros(SAMPLE_RATE, np.float32)).any()
    with pytest.raises(ValueError, match="nothing is voiced"):
        Likeness.of(np.zeros(SAMPLE_RATE, np.float32))


def test_a_sound_is_most_like_its_own_voice() -> None:
    voices = {
        (f0, formant): sound(np.full(80, f0), formant)
        for f0 in (100, 200)
        for formant in (400, 900)
    }
    likenesses = {name: Likeness.of(samples) for name, samples in voices.items()}
    scale = Scale.among(list(likenesses.values()))
    for f0, formant in voices:
        louder = 3 * sound(np.full(80, f0 * 1.05), formant * 1.05)
        to = {
            name: scale.distances(Likeness.of(louder), other) for name, other in likenesses.items()
        }
        assert min(to, key=lambda name: to[name]["both"]) == (f0, formant)
        assert min(to, key=lambda name: to[name]["pitch"])[0] == f0
        assert min(to, key=lambda name: to[name]["spectrum"])[1] == formant


def test_what_is_written_is_read(tmp_path: Path) -> None:
    samples = sound(np.full(80, 150.0))
    with WavFile(tmp_path / "a.wav") as file:
        for part in np.array_split(samples, 7):
            file.write(part)
        assert file.seconds == pytest.approx(len(samples) / SAMPLE_RATE)
    read = read_wav(tmp_path / "a.wav")
    assert np.abs(read - samples).max() < 1.5 / 32768
    (tmp_path / "b.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match="no WAV file"):
        read_wav(tmp_path / "b.wav")
