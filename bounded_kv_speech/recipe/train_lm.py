"""`python -m bounded_kv_speech.recipe.train_lm`: the language model, from the teacher's utterances.

Each example is the beginning of a stream as the engine will see it: a voice, then what a sitting
says in it, with the mask (sink and window) and the positions of the bounded cache. A token's
embedding is one of its own plus what its code's place on the grid says; both become one table.
A run that is stopped goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaModel

from bounded_kv_speech.lm import (
    POSITION_LIMIT,
    SINK,
    WINDOW,
    code_properties,
    llama_config,
)
from bounded_kv_speech.recipe.arguments import amount, checkpoint, count
from bounded_kv_speech.recipe.training import Training, load_trained, moved_average
from bounded_kv_speech.recipe.utterances import Sittings, load
from bounded_kv_speech.tokens import END, FIRST_CODE, PAD, SPEECH, VOCAB_SIZE, VOICE

BATCH, LENGTH = 4, 704
LEARNING_RATE = 2e-3
CHECKPOINT_STEPS = 100
NAME = "lm"
"""Of its checkpoint."""
SHORTEST_VOICE = 39
"""Codes of a voice at least, a second; at most it fills the sink."""
NO_LABEL = -100
HELD_OUT = 8
"""Sittings at the end, never learned from."""


@dataclass(frozen=True)
class Batch:
    """Streams' beginnings; all `[B, T]`, int64."""

    tokens: Tensor
    labels: Tensor
    """What follows each token; `NO_LABEL` where the stream's user says it, not the model."""
    voice: Tensor
    """`[B]`: entries of the voice, which is the sink."""
    offset: Tensor
    """`[B]`: how far down the table of positions the stream is."""


class Voice(nn.Module):
    """The Llama, its table of embeddings in two parts."""

    properties: Tensor

    def __init__(self) -> None:
        super().__init__()
        config = llama_config()
        config._attn_implementation = "sdpa"
        self.llama = LlamaModel(config)
        del self.llama.embed_tokens
        self.own = nn.Parameter(0.02 * torch.randn(VOCAB_SIZE, config.hidden_size))
        self.register_buffer("properties", code_properties(), persistent=False)
        self.of_property = nn.Parameter(
            0.02 * torch.randn(self.properties.shape[1], config.hidden_size)
        )

    def table(self) -> Tensor:
        """Embeddings `[VOCAB_SIZE, hidden]`."""
        shared = self.properties @ self.of_property
        return self.own + functional.pad(shared, (0, 0, FIRST_CODE, 0))

    def forward(self, batch: Batch) -> Tensor:
        """Mean loss over the labels, in nats."""
        table = self.table()
        mask, positions = seen(batch), positions_of(batch)
        hidden = self.llama(
            inputs_embeds=functional.embedding(batch.tokens, table),
            attention_mask=mask[:, None],
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state
        labelled = batch.labels != NO_LABEL
        logits = hidden[labelled] @ table.T
        return functional.cross_entropy(logits, batch.labels[labelled])

    def weights(self) -> dict[str, Tensor]:
        """As an ordinary Llama's."""
        found = {f"model.{name}": value for name, value in self.llama.state_dict().items()}
        return found | {"model.embed_tokens.weight": self.table().detach()}


def seen(batch: Batch) -> Tensor:
    """What each query sees, as the engine has it: bool `[B, T, T]`."""
    at = torch.arange(batch.tokens.shape[1])
    distance = at[:, None] - at
    near = (distance >= 0) & (distance < WINDOW)
    sink = at[None, None] < batch.voice[:, None, None]
    return near | (sink & (distance >= 0))


def positions_of(batch: Batch) -> Tensor:
    """Positions `[B, T]`: the sink's from 0, the others' anywhere that the engine may have them."""
    at = torch.arange(batch.tokens.shape[1]).expand(batch.tokens.shape)
    return at + torch.where(at < batch.voice[:, None], 0, batch.offset[:, None])


@dataclass(frozen=True)
class Example:
    """A stream's beginning: tokens and labels `[LENGTH]`, and the size of its voice."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    voice: int


def example(said: Sittings, first: int, rng: np.random.Generator) -> Example:
    """The stream that begins with utterance `first`, in the voice of any of its sitting."""
    sitting = np.flatnonzero(said.sitting == said.sitting[first])
    sample = said.utterance(int(rng.choice(sitting)))
    codes = sample[sample >= FIRST_CODE]
    size = min(int(rng.integers(SHORTEST_VOICE, SINK)), len(codes))
    at = int(rng.integers(len(codes) - size + 1))
    tokens = [np.concatenate([[VOICE], codes[at : at + size]])]
    labels = [np.full(size + 1, NO_LABEL)]
    for number in range(first, int(sitting[-1]) + 1):
        spoken = said.utterance(number)
        following = np.append(spoken[1:], END)  # the next utterance takes the place of the end
        following[: int(np.argmax(spoken == SPEECH))] = NO_LABEL
        tokens.append(spoken)
        labels.append(following)
    return Example(
        _to_length(np.concatenate(tokens), PAD),
        _to_length(np.concatenate(labels), NO_LABEL),
        size + 1,
    )


def _to_length(values: NDArray[np.int64], filler: int) -> NDArray[np.int64]:
    short = values[:LENGTH]
    return np.pad(short, (0, LENGTH - len(short)), constant_values=filler)


def batch_of(said: Sittings, among: NDArray[np.int64], rng: np.random.Generator) -> Batch:
    """Some streams; half of them far down the table of positions."""
    examples = [example(said, int(first), rng) for first in rng.choice(among, BATCH)]
    far = rng.integers(POSITION_LIMIT - SINK - WINDOW + 1, size=BATCH)
    return Batch(
        torch.from_numpy(np.stack([each.tokens for each in examples])),
        torch.from_numpy(np.stack([each.labels for each in examples])),
        torch.tensor([each.voice for each in examples]),
        torch.from_numpy(np.where(rng.random(BATCH) < 0.5, far, 0)),
    )


def main(argv: list[str] | None = None) -> int:
    """Train to the end, or go on."""
    parser = argparse.ArgumentParser(prog="python -m bounded_kv_speech.recipe.train_lm")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--steps", type=count, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=amount, default=LEARNING_RATE, help="at most (%(default)s)")
    parser.add_argument(
        "--begin",
        type=checkpoint,
        metavar="CHECKPOINT",
        help="of another run, to begin with its weights",
    )
    parser.add_argument(
        "--compile", action="store_true", help="by PyTorch: faster after a minute; needs g++"
    )
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    said = load(args.work)
    is_held_out = said.sitting > said.sitting[-1] - HELD_OUT
    learned, held_out = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    voice = Voice()
    if args.begin is not None:
        voice.load_state_dict(torch.load(args.begin, weights_only=True)["model"])
    if args.compile:
        voice.llama.compile(dynamic=False)
    training = Training(voice, args.work, NAME, args.rate, args.steps)
    average: float | None = None
    for step in training.steps():
        loss = voice(batch_of(said, learned, np.random.default_rng([args.seed, step])))
        training.descend(step, loss)
        average = moved_average(average, loss.item())
        training.show({"loss": average})
        if training.is_due(step, CHECKPOINT_STEPS):
            unseen = evaluate(voice, said, held_out)
            training.save(step, {"loss": average, "unseen": unseen})
    return 0


def load_voice(work: Path) -> Voice:
    """The language model that was trained in a work folder.

    Raises:
        FileNotFoundError: when there is none.
    """
    voice = Voice()
    load_trained(voice, work, NAME)
    return voice


@torch.no_grad()
def evaluate(voice: Voice, said: Sittings, among: NDArray[np.int64]) -> float:
    """Mean loss over the same few streams that are never learned from."""
    rng = np.random.default_rng(7)
    return float(np.mean([voice(batch_of(said, among, rng)).item() for _ in range(4)]))


if __name__ == "__main__":
    sys.exit(main())
