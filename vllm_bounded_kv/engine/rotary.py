"""Turning cached keys: a rotary embedding's frequencies, applied to keys that are rotated already.

Rotations add up, so a key written at position `a` becomes one written at `a + n` when it is turned
by `n`. Scaled embeddings (Llama 3's, linear, YaRN) differ in their frequencies only; YaRN's
magnitude is in the key already and stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rotation:
    """A rotation of `n` keys, each by one of a few angles."""

    cos: torch.Tensor
    """`[angles, rotary_dim / 2]` float32."""
    sin: torch.Tensor
    which: torch.Tensor
    """`[n]` int64: the angle of each key."""
    is_neox: bool

    def __call__(self, keys: torch.Tensor) -> torch.Tensor:
        """Turned copies of `keys`, `[..., n, D]`; dimensions beyond `rotary_dim` stay."""
        half = self.cos.shape[-1]
        cos, sin = self.cos[self.which], self.sin[self.which]
        turned = keys.clone()
        part = keys[..., : 2 * half].float()
        out = turned[..., : 2 * half]
        if self.is_neox:  # pairs (i, i + half)
            a, b = part[..., :half], part[..., half:]
            out[..., :half] = a * cos - b * sin
            out[..., half:] = b * cos + a * sin
        else:  # pairs (2i, 2i + 1)
            a, b = part[..., ::2], part[..., 1::2]
            out[..., ::2] = a * cos - b * sin
            out[..., 1::2] = b * cos + a * sin
        return turned


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding, reduced to what turning needs."""

    frequencies: NDArray[np.float64]
    """`[rotary_dim / 2]` radians a position."""
    is_neox: bool

    def rotation(self, by: NDArray[np.int64]) -> Rotation:
        """The rotation of `n` keys by `by` positions each."""
        distinct, which = np.unique(by, return_inverse=True)
        angles = distinct[:, None] * self.frequencies
        cos, sin = (torch.from_numpy(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        return Rotation(cos, sin, torch.from_numpy(which), self.is_neox)
