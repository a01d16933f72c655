"""`python -m bounded_kv_speech.recipe.train_codec`: encoder and decoder, together, from the corpus.

The decoder learns the frames that the teacher's sound is made of, not the sound: a plain
regression, which needs no synthesis and no discriminator.
A run that is stopped goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from bounded_kv_speech import fsq
from bounded_kv_speech.codec import CodecConfig, Decoder, Encoder, attend_at_once
from bounded_kv_speech.frames import (
    FRAMES_PER_CODE,
    NUM_HARMONIC,
    NUM_NOISE,
    SAMPLE_RATE,
    band_centres,
    interpolation,
)
from bounded_kv_speech.recipe.corpus import Shard, load
from bounded_kv_speech.tokens import VOICE

BATCH, CODES = 16, 64
LEARNING_RATE, WARM_UP = 2e-3, 200
CHECKPOINT_STEPS = 250
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


class Codec(nn.Module):
    """Both halves."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(config), Decoder(config)

    def forward(self, features: Tensor, marks: Tensor) -> Tensor:
        """Features `[B, F, NUM_FEATURES]`, marks `[B, T]` to frames `[B, F, NUM_VALUES]`."""
        points = self.encoder(features)
        positions = torch.arange(points.shape[1]).expand(points.shape[:2])
        return self.decoder(points, marks, positions, attend_at_once)


def main(argv: list[str] | None = None) -> int:
    """Train to the end, or go on."""
    parser = argparse.ArgumentParser(prog="python -m bounded_kv_speech.recipe.train_codec")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    corpus = load(args.work)
    codec, audible = Codec(CodecConfig()), Audible()
    _normalise(codec.decoder, corpus)
    optimiser = torch.optim.AdamW(
        codec.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    checkpoint, log = args.work / "codec.pt", args.work / "codec.jsonl"
    start = _resume(checkpoint, codec, optimiser)
    averages: dict[str, float] = {}
    used = np.zeros(fsq.NUM_CODES, bool)
    with tqdm(total=args.steps, initial=start, unit=" steps", file=sys.stderr) as bar:
        for step in range(start, args.steps):
            for group in optimiser.param_groups:
                group["lr"] = LEARNING_RATE * schedule(step, args.steps)
            features, marks, targets = _batch(corpus, np.random.default_rng([args.seed, step]))
            parts = losses(codec(features, marks), targets, audible)
            loss = torch.stack([WEIGHTS[name] * part for name, part in parts.items()]).sum()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(codec.parameters(), 1.0)
            optimiser.step()
            for name, part in parts.items():
                averages[name] = 0.98 * averages.get(name, part.item()) + 0.02 * part.item()
            bar.update()
            if (step + 1) % 25 == 0:
                bar.set_postfix({name: f"{value:.4f}" for name, value in averages.items()})
            if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == args.steps:
                with torch.no_grad():
                    used[fsq.to_codes(codec.encoder(features)).numpy()] = True
                _save(checkpoint, codec, optimiser, step + 1)
                with log.open("a") as file:
                    file.write(
                        json.dumps({"step": step + 1, **averages, "used": int(used.sum())}) + "\n"
                    )
    return 0


def load_codec(work: Path) -> Codec:
    """The codec that was trained in a work folder.

    Raises:
        FileNotFoundError: when there is none.
    """
    path = work / "codec.pt"
    if not path.exists():
        raise FileNotFoundError(
            f"no codec in {work}; train it with -m bounded_kv_speech.recipe.train_codec"
        )
    codec = Codec(CodecConfig())
    codec.load_state_dict(torch.load(path, weights_only=True)["codec"])
    return codec.eval().requires_grad_(False)


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate: a short rise, then a cosine to nearly nothing."""
    rise = min(1.0, (step + 1) / WARM_UP)
    return rise * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _batch(corpus: Shard, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
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


def _normalise(decoder: Decoder, corpus: Shard) -> None:
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


def _save(path: Path, codec: Codec, optimiser: torch.optim.Optimizer, step: int) -> None:
    part = path.with_suffix(".part")
    torch.save(
        {"step": step, "codec": codec.state_dict(), "optimiser": optimiser.state_dict()}, part
    )
    part.rename(path)


def _resume(path: Path, codec: Codec, optimiser: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    codec.load_state_dict(saved["codec"])
    optimiser.load_state_dict(saved["optimiser"])
    return int(saved["step"])


if __name__ == "__main__":
    sys.exit(main())
