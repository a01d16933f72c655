"""The codec's two networks: from spectra to codes, and from codes to frames.

The encoder sees around it; it is used on whole voice samples. The decoder is causal: each code sees
itself and the `QUERY_WINDOW` before it, so a stream of any age needs as many keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bounded_kv_speech import fsq
from bounded_kv_speech.features import NUM_FEATURES
from bounded_kv_speech.frames import FRAMES_PER_CODE, NUM_VALUES
from bounded_kv_speech.tokens import FIRST_CODE

QUERY_WINDOW = 15
"""Codes before its own that a code sees: 375 ms."""
ROPE_BASE = 100.0
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Layer, then q, k and v `[B, H, T, D]`, keys rotated, to `[B, T, H, D]`."""


@dataclass(frozen=True)
class CodecConfig:
    """Sizes of the networks."""

    width: int = 192
    encoder_layers: int = 4
    kernel: int = 7
    decoder_layers: int = 4
    heads: int = 4

    @property
    def head_dim(self) -> int:
        """Of the decoder's attention."""
        return self.width // self.heads


class _ConvBlock(nn.Module):
    """Depthwise convolution over time, then a network for each step of it (ConvNeXt's block)."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(functional.gelu(self.up(self.norm(mixed))))


class Encoder(nn.Module):
    """Features `[B, T * FRAMES_PER_CODE, NUM_FEATURES]` to grid points `[B, T, D]`."""

    def __init__(self, config: CodecConfig) -> None:
        """Random weights."""
        super().__init__()
        self.inside = nn.Linear(FRAMES_PER_CODE * NUM_FEATURES, config.width)
        self.blocks = nn.ModuleList(
            _ConvBlock(config.width, config.kernel) for _ in range(config.encoder_layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.outside = nn.Linear(config.width, len(fsq.LEVELS))

    def forward(self, features: Tensor) -> Tensor:
        """See the class."""
        x = self.inside(features.unflatten(1, (-1, FRAMES_PER_CODE)).flatten(2))
        for block in self.blocks:
            x = block(x)
        return fsq.quantise(self.outside(self.norm(x)))


class _Layer(nn.Module):
    """Attention, then a gated network, before each a norm."""

    def __init__(self, config: CodecConfig, index: int) -> None:
        super().__init__()
        self.index, self.heads = index, config.heads
        self.norm1, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(2 * config.width, config.width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(self.index, rotate(q, rotation), rotate(k, rotation), v).flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Decoder(nn.Module):
    """Grid points and their marks to frames `[B, T * FRAMES_PER_CODE, NUM_VALUES]`.

    Marks say which phone sounds (`tokens.py`), so that codes need to say but how.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, config: CodecConfig) -> None:
        """Random weights."""
        super().__init__()
        self.config = config
        self.inside = nn.Sequential(
            nn.Linear(len(fsq.LEVELS), config.width),
            nn.GELU(),
            nn.Linear(config.width, config.width),
        )
        self.mark = nn.Embedding(FIRST_CODE, config.width)
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.decoder_layers))
        self.norm = nn.RMSNorm(config.width)
        self.outside = nn.Linear(config.width, FRAMES_PER_CODE * NUM_VALUES)
        self.register_buffer("mean", torch.zeros(NUM_VALUES))
        self.register_buffer("scale", torch.ones(NUM_VALUES))

    def forward(self, points: Tensor, marks: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Of `points [B, T, D]`, `marks [B, T]` and `positions [B, T]` in their streams."""
        x = self.inside(points) + self.mark(marks)
        rotation = rotation_at(positions, self.config.head_dim, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, attend)
        frames = (
            self.outside(self.norm(x)).unflatten(-1, (FRAMES_PER_CODE, NUM_VALUES)).flatten(1, 2)
        )
        return frames * self.scale + self.mean


def rotation_at(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[B, 1, T, head_dim / 2]` in `dtype`, of angles in float64."""
    exponents = (
        torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    )
    angles = (positions.double()[..., None] * ROPE_BASE**-exponents)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE in halves, as Llama's."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attend_at_once(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over whole streams from their beginnings: what training sees."""
    at = torch.arange(q.shape[2], device=q.device)
    distance = at[:, None] - at
    mask = (distance >= 0) & (distance <= QUERY_WINDOW)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


class Codec(nn.Module):
    """Both halves."""

    def __init__(self, config: CodecConfig) -> None:
        """Random weights."""
        super().__init__()
        self.encoder, self.decoder = Encoder(config), Decoder(config)

    def forward(self, features: Tensor, marks: Tensor) -> Tensor:
        """Features `[B, F, NUM_FEATURES]`, marks `[B, T]` to frames `[B, F, NUM_VALUES]`."""
        points = self.encoder(features)
        positions = torch.arange(points.shape[1]).expand(points.shape[:2])
        return self.decoder(points, marks, positions, attend_at_once)
