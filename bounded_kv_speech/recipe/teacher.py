"""The teacher: hibari's voice, made into many by pitch and by the size of the head.

Its graph is asked for one output more, how long each phoneme lasts, in units of 25 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import hibari
import numpy as np
import onnx
import onnxruntime
import soxr
from hibari import dsp
from numpy.typing import NDArray

from bounded_kv_speech.frames import HOP, MIN_F0, SAMPLE_RATE, Floats

DURATIONS = "/Cast_32_output_0"
"""Of hibari-tts 0.2.1's graph: `[1, L]`, in the teacher's frames of 25 ms."""
LOUDNESS = 0.06
"""Root mean square of every utterance, full scale being 1."""
SILENT = -30.0
"""Of log amplitudes."""
TEACHER_FRAMES = 2
"""Frames of the spectra in one of the durations'."""


@dataclass(frozen=True)
class Voice:
    """What is done to the teacher's voice.

    Pitches of 0.7 to 1.25 and sizes of 0.84 to 1 are understood as well as the teacher is.
    """

    pitch: float = 1.0
    """Factor of f0 before the size."""
    size: float = 1.0
    """Factor of all frequencies: below 1, a larger head."""


BUILT_IN = {
    "heart": Voice(),
    "robin": Voice(1.25, 0.97),
    "sage": Voice(0.9, 0.92),
    "reed": Voice(0.7, 1.0),
    "otto": Voice(0.7, 0.86),
}
"""The voices that come with the model."""
PITCHES, SIZES = (0.65, 1.3), (0.84, 1.0)
BUILT_IN_SHARE = 0.75


def any_voice(rng: np.random.Generator) -> Voice:
    """A voice to learn from: one of those built in, or any other."""
    if rng.random() < BUILT_IN_SHARE:
        return list(BUILT_IN.values())[rng.integers(len(BUILT_IN))]
    return Voice(float(np.exp(rng.uniform(*np.log(PITCHES)))), float(rng.uniform(*SIZES)))


@dataclass(frozen=True)
class Utterance:
    """One sentence, spoken."""

    coherent: Floats
    """`[N]`, at 24 kHz: of voiced speech, what is no noise."""
    noise: Floats
    """`[N]`: the rest."""
    pulses: Floats
    """`[N]`: the excitation behind its harmonics, each of amplitude 1."""
    f0: Floats
    """`[N // HOP]`, in Hz; 0 where unvoiced."""
    phonemes: str
    ends: NDArray[np.float64]
    """Where each phoneme ends, in seconds; the first and last belong to the silence around."""

    @property
    def samples(self) -> Floats:
        """All of its sound, `[N]`."""
        return self.coherent + self.noise


class Teacher:
    """The teacher, loaded once: about a hundred times as fast as speech on one core."""

    def __init__(self) -> None:
        self.front_end = hibari.Hibari()
        model = onnx.load(self.front_end.model_path)
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(DURATIONS))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options)

    def phonemes(self, text: str) -> Iterator[str]:
        """Of each sentence of a text."""
        yield from self.front_end.phonemize(text)

    def say(self, phonemes: str, voice: Voice, seed: int, pace: float = 1.0) -> Utterance:
        """One sentence in `voice`; `pace` 1.0 is the teacher's own, whatever the voice's size."""
        known = "".join(p for p in phonemes if p in self.front_end.vocab)
        ids = np.asarray([self.front_end.ids(known)], np.int64)
        speed = np.asarray([pace / voice.size], np.float32)
        outputs = self.session.run(None, {"ids": ids, "speed": speed})
        harmonic, phase, noise, free, free_phase, f0 = (output[0] for output in outputs[:-1])
        durations = outputs[-1].reshape(-1)
        f0 = f0 * np.float32(voice.pitch)
        # The branch of free phases is coherent with the pulses where there are any.
        silent, voiced = np.full_like(noise, SILENT), f0 >= MIN_F0
        sounds = [
            dsp.synth(*spectra, free_phase, f0, np.random.default_rng(seed))
            for spectra in (
                (harmonic, phase, silent, np.where(voiced, free, SILENT)),
                (silent, phase, noise, np.where(voiced, SILENT, free)),
            )
        ]
        pulses = dsp.pulses(f0)
        ends = np.cumsum(durations) * TEACHER_FRAMES * HOP / SAMPLE_RATE / voice.size
        if voice.size != 1.0:
            rate = SAMPLE_RATE * voice.size
            *sounds, pulses = (soxr.resample(x, rate, SAMPLE_RATE) for x in (*sounds, pulses))
            frames = (np.arange(len(pulses) // HOP) + 0.5) * voice.size - 0.5
            near = np.clip(np.rint(frames).astype(int), 0, len(f0) - 1)
            between = np.interp(frames, np.arange(len(f0)), f0)
            f0 = np.where(f0[near] > 0, between, 0) * voice.size
        coherent, rest = sounds
        level = float(np.sqrt(np.mean(np.square(coherent + rest))))
        gain = LOUDNESS / max(level, 1e-4)
        return Utterance(
            (coherent * gain).astype(np.float32),
            (rest * gain).astype(np.float32),
            pulses.astype(np.float32),
            f0.astype(np.float32),
            known,
            ends,
        )
