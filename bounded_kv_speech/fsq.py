"""Finite scalar quantisation: a code is a point of a grid (Mentzer et al., arXiv 2309.15505)."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

LEVELS = (8, 8, 8, 4, 4)
"""Grid points of each dimension."""
NUM_CODES = prod(LEVELS)
_MARGIN = 1e-3


def _weights(x: Tensor) -> Tensor:
    """Of the digits of a code, the first the lowest."""
    return torch.tensor([prod(LEVELS[:i]) for i in range(len(LEVELS))], device=x.device)


def _constants(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    levels = torch.tensor(LEVELS, dtype=x.dtype, device=x.device)
    half = (levels - 1) * (1 + _MARGIN) / 2
    offset = torch.where(levels % 2 == 0, 0.5, 0.0).to(x.dtype)
    return levels, half, offset


def quantise(x: Tensor) -> Tensor:
    """Grid points `[..., D]` in -1 to 1 of `x [..., D]`; gradients pass straight through."""
    levels, half, offset = _constants(x)
    bounded = torch.tanh(x + torch.atanh(offset / half)) * half - offset
    rounded = bounded + (bounded.round() - bounded).detach()
    return rounded / (levels // 2)


def to_codes(points: Tensor) -> Tensor:
    """Codes `[...]`, int64, of grid points `[..., D]`."""
    levels, _, _ = _constants(points)
    digits = (points * (levels // 2) + levels // 2).round().long()
    return (digits * _weights(points)).sum(-1)


def to_points(codes: Tensor) -> Tensor:
    """Grid points `[..., D]`, float32, of codes `[...]`."""
    levels = torch.tensor(LEVELS, device=codes.device)
    digits = codes[..., None] // _weights(codes) % levels
    return (digits - levels // 2).float() / (levels // 2)
