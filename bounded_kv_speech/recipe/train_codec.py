"""`python -m bounded_kv_speech.recipe.train_codec`: encoder and decoder, together, from the corpus.

The decoder learns the frames that the teacher's sound is made of, not the sound: a plain
regression, which needs no synthesis and no discriminator. `--decoder-of CHECKPOINT` keeps that
codec's encoder, and so the codes that a language model has learned, and trains its decoder on.
A run that is stopped goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bounded_kv_speech import fsq
from bounded_kv_speech.codec import Codec, CodecConfig, Decoder
from bounded_kv_speech.frames import (
    FRAMES_PER_CODE,
    NUM_HARMONIC,
    NUM_NOISE,
    SAMPLE_RATE,
    band_centres,
    interpolation,
)
from bounded_kv_speech.recipe.arguments import checkpoint, count
from bounded_kv_speech.recipe.corpus import Corpus, load
from bounded_kv_speech.recipe.training import Training, load_trained, moved_average
from bounded_kv_speech.tokens import VOICE

BATCH, CODES = 16, 64
LEARNING_RATE = 2e-3
CHECKPOINT_STEPS = 250
NAME = "codec"
"""Of its checkpoint."""
UNMARKED_SHARE = 0.15
UNHEARD = 2.3
"""Nepers (20 dB): a part of the sound this far below the other is not heard, and not learned."""
QUIETEST = -9.5
"""Log amplitude below which nothing is heard."""
WEIGHTS = {"harmonic": 1.0, "noise": 1.0, "pitch": 4.0, "voiced": 0.5}


class Audible(nn.Module):
    """Raises targets and predictions to what can be heard beside the other part of the sound."""

    up: Tensor
    down: Tensor

    def __init__(self) -> None:
        super().__init__()
        low, high = band_centres(NUM_NOISE), band_centres(NUM_HARMONIC)
        self.register_buffer("up", torch.from_numpy(interpolation(low, high)))
        self.register_buffer("down", torch.from_numpy(interpolation(high, low)))

    def floors(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest log amplitude that matters, by harmonic band and by noise band."""
        harmonic, noise = targets[..., :NUM_HARMONIC], targets[..., NUM_HARMONIC:-2]
        pitch, voiced = targets[..., -2:-1], targets[..., -1:] > 0.5
        # Power per Hz: a harmonic's a^2 / 2 in every f0; white noise's sigma^2 in half the rate.
        same = 0.5 * (pitch + math.log(2) - math.log(SAMPLE_RATE / 2))
        of_noise = noise @ self.up + same - UNHEARD
        of_harmonic = torch.where(voiced, harmonic @ self.down - same - UNHEARD, QUIETEST)
        return of_noise.clamp(min=QUIETEST), of_harmonic.clamp(min=QUIETEST)


def losses(predicted: Tensor, targets: Tensor, audible: Audible) -> dict[str, Tensor]:
    """Mean absolute errors: nepers of the envelopes, of log f0; cross entropy of the voicing."""
    harmonic_floor, noise_floor = audible.floors(targets)
    voiced = targets[..., -1]
    weight = voiced / voiced.mean().clamp(min=0.01)
    harmonic = _above(harmonic_floor, predicted, targets, slice(0, NUM_HARMONIC)).mean(-1)
    noise = _above(noise_floor, predicted, targets, slice(NUM_HARMONIC, -2)).mean()
    pitch = (predicted[..., -2] - targets[..., -2]).abs()
    voicing = nn.functional.binary_cross_entropy_with_logits(8 * (predicted[..., -1] - 0.5), voiced)
    return {
        "harmonic": (harmonic * weight).mean(),
        "noise": noise,
        "pitch": (pitch * weight).mean(),
        "voiced": voicing,
    }


def _above(floor: Tensor, predicted: Tensor, targets: Tensor, part: slice) -> Tensor:
    return (
        torch.maximum(predicted[..., part], floor) - torch.maximum(targets[..., part], floor)
    ).abs()


def main(argv: list[str] | None = None) -> int:
    """Train to the end, or go on."""
    parser = argparse.ArgumentParser(prog="python -m bounded_kv_speech.recipe.train_codec")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--steps", type=count, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decoder-of", type=checkpoint, metavar="CHECKPOINT")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    corpus = load(args.work)
    codec, audible = Codec(CodecConfig()), Audible()
    if args.decoder_of is not None:
        codec.load_state_dict(torch.load(args.decoder_of, weights_only=True)["model"])
        codec.encoder.requires_grad_(False)
    _normalise(codec.decoder, corpus)
    training = Training(codec, args.work, NAME, LEARNING_RATE, args.steps)
    averages: dict[str, float] = {}
    used = np.zeros(fsq.NUM_CODES, bool)
    for step in training.steps():
        features, marks, targets = _batch(corpus, np.random.default_rng([args.seed, step]))
        parts = losses(codec(features, marks), targets, audible)
        training.descend(
            step, torch.stack([WEIGHTS[name] * part for name, part in parts.items()]).sum()
        )
        for name, part in parts.items():
            averages[name] = moved_average(averages.get(name), part.item())
        training.show(averages)
        if training.is_due(step, CHECKPOINT_STEPS):
            with torch.no_grad():
                used[fsq.to_codes(codec.encoder(features)).numpy()] = True
            training.save(step, {**averages, "used": int(used.sum())})
    return 0


def load_codec(work: Path) -> Codec:
    """The codec that was trained in a work folder.

    Raises:
        FileNotFoundError: when there is none.
    """
    codec = Codec(CodecConfig())
    load_trained(codec, work, NAME)
    return codec


def _batch(corpus: Corpus, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Features, marks and targets of some spans; nobody says what is said in some of them."""
    span = CODES * FRAMES_PER_CODE
    starts = rng.integers((len(corpus.targets) - span) // FRAMES_PER_CODE, size=BATCH)
    rows = (starts * FRAMES_PER_CODE)[:, None] + np.arange(span)
    marks = corpus.marks[starts[:, None] + np.arange(CODES)].astype(np.int64)
    marks[rng.random(BATCH) < UNMARKED_SHARE] = VOICE
    return (
        torch.from_numpy(corpus.features[rows].astype(np.float32)),
        torch.from_numpy(marks),
        torch.from_numpy(corpus.targets[rows].astype(np.float32)),
    )


def _normalise(decoder: Decoder, corpus: Corpus) -> None:
    some = corpus.targets[:: max(1, len(corpus.targets) // 100_000)].astype(np.float32)
    mean, scale = some.mean(0), np.maximum(some.std(0), 0.1)
    voiced = some[some[:, -1] > 0.5]
    mean[:NUM_HARMONIC], scale[:NUM_HARMONIC] = (
        voiced[:, :NUM_HARMONIC].mean(0),
        voiced[:, :NUM_HARMONIC].std(0),
    )
    mean[-2], scale[-2] = voiced[:, -2].mean(), voiced[:, -2].std()
    decoder.mean.copy_(torch.from_numpy(mean))
    decoder.scale.copy_(torch.from_numpy(scale))


if __name__ == "__main__":
    sys.exit(main())
