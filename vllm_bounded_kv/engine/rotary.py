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
    """A rotation of `n` keys, each by its own angle."""

    cos: torch.Tensor
    """`[n, rotary_dim / 2]` float32."""
    sin: torch.Tensor
    is_neox: bool

    def __call__(self, keys: torch.Tensor) -> torch.Tensor:
        """Turned copies of `keys`, `[..., n, D]`; dimensions beyond `rotary_dim` stay."""
        half = self.cos.shape[-1]
        turned = keys.clone()
        part = keys[..., : 2 * half].float()
        out = turned[..., : 2 * half]
        if self.is_neox:  # pairs (i, i + half)
            a, b = part[..., :half], part[..., half:]
            out[..., :half] = a * self.cos - b * self.sin
            out[..., half:] = b * self.cos + a * self.sin
        else:  # pairs (2i, 2i + 1)
            a, b = part[..., ::2], part[..., 1::2]
            out[..., ::2] = a * self.cos - b * self.sin
            out[..., 1::2] = b * self.cos + a * self.sin
        return turned


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding, reduced to what turning needs."""

    frequencies: NDArray[np.float64]
    """`[rotary_dim / 2]` radians a position."""
    is_neox: bool

    def rotation(self, by: NDArray[np.int64]) -> Rotation:
        """The rotation of `n` keys by `by` positions each."""
        angles = by[:, None] * self.frequencies
        cos, sin = (torch.from_numpy(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        return Rotation(cos, sin, self.is_neox)
