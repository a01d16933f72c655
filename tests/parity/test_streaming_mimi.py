"""Mimi's decoder transformer, streamed from a slot pool, equals transformers' own `MimiModel`.

The reference is transformers alone, with its own masks and its own attention: a whole stream in one
go, or chunk by chunk through its own cache. The streams differ in age, intro and chunks.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from examples.streaming_decoders import mimi

TOLERANCE = 1e-11
LENGTHS = {"long": 150, "late": 60, "short": 25, "after all others": 40, "last": 8}
INTROS = {"long": 0, "late": 2, "short": 1, "after all others": 2, "last": 1}
INTRO_LENS = (0, 3, 21)
"""None; less than Mimi looks back; more."""


@pytest.fixture(scope="module")
def model() -> Any:
    return mimi.small_mimi()


@pytest.fixture(scope="module")
def stock(model: Any) -> Any:
    """The same weights, with nothing of ours."""
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("sdpa")
    return stock


def normal(num_tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, 32, generator=generator, dtype=torch.float64)


INTRO_INPUTS = [normal(length, seed) for seed, length in enumerate(INTRO_LENS)]
INPUTS = {name: normal(length, 10 + i) for i, (name, length) in enumerate(LENGTHS.items())}


@torch.no_grad()
def streamed(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """All inputs, in chunks of 0 to 12 tokens, three streams at a time."""
    rng = random.Random(seed)
    intros = [mimi.intro_of(model, x) for x in INTRO_INPUTS]
    pooled = mimi.PooledMimi(model, intros, max_slots=3)
    pooled.manager.slots.fill_(torch.nan)
    outputs: dict[str, list[Tensor]] = {name: [] for name in INPUTS}
    waiting = list(INPUTS)
    open_: dict[str, int] = {}  # tokens served of each
    while waiting or open_:
        if waiting and len(open_) < 3:
            pooled.open(waiting[0], INTROS[waiting[0]])
            open_[waiting.pop(0)] = 0
        names = rng.sample(list(open_), rng.randint(1, len(open_)))
        sizes = [rng.randint(0, 12) for _ in names]
        sizes[0] = max(sizes[0], 1)
        chunks = {
            name: INPUTS[name][open_[name] :][:size]
            for name, size in zip(names, sizes, strict=True)
        }
        for name, output in pooled.step(chunks).items():
            outputs[name].append(output)
            open_[name] += len(output)
            if open_[name] == LENGTHS[name]:
                slot = pooled.manager.slot_of(name)
                pooled.close(name)
                del open_[name]
                pooled.manager.slots[:, slot] = torch.nan
    return {name: torch.cat(chunks) for name, chunks in outputs.items()}


@torch.no_grad()
def in_one_go(stock: Any, name: str) -> Tensor:
    """Intro and stream as one sequence; what comes after the intro."""
    intro = INTRO_INPUTS[INTROS[name]]
    whole = torch.cat([intro, INPUTS[name]])[None]
    return stock.decoder_transformer(whole, use_cache=False).last_hidden_state[0, len(intro) :]


def worst(outputs: dict[str, Tensor], stock: Any) -> float:
    differences = [outputs[name] - in_one_go(stock, name) for name in INPUTS]
    return max(d.abs().nan_to_num(nan=torch.inf).max().item() for d in differences)


@pytest.mark.parametrize("seed", range(3))
def test_streams_equal_transformers_in_one_go(model: Any, stock: Any, seed: int) -> None:
    assert worst(streamed(model, seed), stock) <= TOLERANCE


@torch.no_grad()
def test_streams_equal_transformers_in_chunks(model: Any, stock: Any) -> None:
    """Its own sliding-window cache, one stream at a time."""
    outputs = streamed(model)
    for name, x in INPUTS.items():
        cache = DynamicCache(config=stock.config)
        chunks = [INTRO_INPUTS[INTROS[name]], *x.split(5)]
        chunked = [
            stock.decoder_transformer(
                chunk[None], past_key_values=cache, use_cache=True
            ).last_hidden_state[0]
            for chunk in chunks
            if len(chunk)
        ]
        wanted = torch.cat(chunked)[-len(x) :]
        assert (outputs[name] - wanted).abs().max().item() <= TOLERANCE


@torch.no_grad()
def test_audio_equals_transformers(model: Any, stock: Any) -> None:
    """From codes to samples; the convolutions on both sides of the transformer run in one go."""
    codes = torch.randint(0, 16, (1, 4, 30), generator=torch.Generator().manual_seed(0))
    x = model.upsample(model.quantizer.decode(codes)).transpose(1, 2)[0]
    pooled = mimi.PooledMimi(model, [mimi.intro_of(model, x[:0])])
    pooled.open("stream", 0)
    hidden = torch.cat([pooled.step({"stream": chunk})["stream"] for chunk in x.split(2)])
    audio = model.decoder(hidden.T[None])
    wanted = stock.decode(codes).audio_values
    assert wanted.abs().max() > 0.01
    assert (audio - wanted).abs().max().item() <= TOLERANCE


# --- controls: these tests can fail


@pytest.mark.parametrize("by", [-1, 1])
def test_control_another_window_is_noticed(
    monkeypatch: pytest.MonkeyPatch, model: Any, stock: Any, by: int
) -> None:
    """So the convention of Mimi's mask is the one that we took."""
    spec_of = mimi.spec_of

    def other(config: Any, *sizes: int) -> Any:
        changed = copy.deepcopy(config)
        changed.sliding_window += by
        return spec_of(changed, *sizes)

    monkeypatch.setattr(mimi, "spec_of", other)
    assert worst(streamed(model), stock) > 1e-3


def test_control_other_positions_are_noticed(
    monkeypatch: pytest.MonkeyPatch, model: Any, stock: Any
) -> None:
    run = mimi.run_transformer
    monkeypatch.setattr(
        mimi,
        "run_transformer",
        lambda model, x, start, attend: run(model, x, start.clamp(max=30), attend),
    )
    assert worst(streamed(model), stock) > 1e-3
