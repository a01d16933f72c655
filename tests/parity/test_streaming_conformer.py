"""The conformer's positions are Transformer-XL's, spelt out pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from examples.streaming_decoders.conformer import HEAD_DIM, HEADS, WIDTH, Conformer, sinusoid
from vllm_bounded_kv import BoundedKVConfig, BoundedKVStep, SinkWindow, StreamPosition
from vllm_bounded_kv.manager import BoundedKVManager

CHUNKS = (3, 1, 2, 2)
"""8 tokens, fewer than are retained: nothing is forgotten here."""


@torch.no_grad()
@pytest.mark.parametrize("shift", [0, 1])
def test_scores_are_transformer_xls(shift: int) -> None:
    """With a shift, a control."""
    attention = Conformer().slow[0].attention
    retention = SinkWindow(2, attention.max_retained - 2)
    config = BoundedKVConfig(1, HEADS, HEAD_DIM, 1, 0, retention, dtype=torch.float64)
    manager = BoundedKVManager(config)
    x = torch.randn(sum(CHUNKS), WIDTH, generator=torch.Generator().manual_seed(0)).double()
    streamed, written = [], 0
    for chunk in x.split(CHUNKS):
        step = BoundedKVStep([("stream", len(chunk))], {"stream": StreamPosition(0, written)})
        assert not manager.admit(step)
        manager.plan(step)
        streamed.append(attention(chunk[None], 0, manager.attend)[0])
        manager.commit(step)
        written += len(chunk)

    q, k, v = attention.qkv(x).view(len(x), 3, HEADS, HEAD_DIM).unbind(1)
    ends = [
        end
        for end, size in zip(torch.tensor(CHUNKS).cumsum(0), CHUNKS, strict=True)
        for _ in range(size)
    ]
    wanted = torch.zeros(len(x), HEADS, HEAD_DIM, dtype=torch.float64)
    for head in range(HEADS):
        u, w = attention.u[head, 0], attention.v[head, 0]
        for i, end in enumerate(ends):
            scores = []
            for j in range(int(end)):
                r = attention.position(sinusoid(torch.tensor([i - j + shift])))[0]
                r = r.view(HEADS, HEAD_DIM)[head]
                score = (q[i, head] + u) @ k[j, head] + (q[i, head] + w) @ r
                scores.append(score / math.sqrt(HEAD_DIM))
            weights = torch.stack(scores).softmax(0)
            wanted[i, head] = weights @ v[: int(end), head]
    error = (torch.cat(streamed) - attention.out(wanted.flatten(1))).abs().max().item()
    assert (error > 1e-3) if shift else (error <= 1e-12)
