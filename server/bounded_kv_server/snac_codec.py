"""The SNAC codec (package `snac`) for streams: its noise a function of where a frame is.

SNAC's decoder adds noise in each of its blocks. Drawn anew with each call, as the package does,
it would differ from window to window; here it is the same for a frame wherever it is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bounded_kv_server.profile import Floats
from bounded_kv_server.windowed import Frames, Reach, Windowed

FRAME_CODES, CODEBOOK = 7, 4096
"""Codes of a frame, of SNAC's three codebooks: one, two and four of them."""
ORDER = ((0,), (1, 4), (2, 3, 5, 6))
"""Which of a frame's codes are of which codebook, as Orpheus writes them."""
_MOST_FRAMES = 8


@dataclass
class _Place:
    """What is being decoded: whose noise, from which frame, and how many frames."""

    seed: int = 0
    first: int = 0
    count: int = 1


@dataclass(eq=False)
class SnacCodec:
    """A `snac.SNAC` of three codebooks, made ready; not for two threads at once."""

    model: Any
    reach: Reach = field(init=False)
    _place: _Place = field(default_factory=_Place, init=False)

    def __post_init__(self) -> None:
        if list(self.model.vq_strides) != [4, 2, 1] or self.model.attn_window_size is not None:
            raise ValueError(
                f"SNAC with vq_strides {self.model.vq_strides} and attn_window_size "
                f"{self.model.attn_window_size}: must be [4, 2, 1] and None, as snac_24khz"
            )
        self.model.eval().requires_grad_(False)
        noisy = [
            (module, name)
            for module in self.model.decoder.modules()
            for name, child in module.named_children()
            if type(child).__name__ == "NoiseBlock"
        ]
        for number, (module, name) in enumerate(noisy):
            setattr(module, name, _PlacedNoise(getattr(module, name).linear, number, self._place))
        size = self.model.codebook_size
        some = np.stack([np.zeros(FRAME_CODES, np.int64), np.full(FRAME_CODES, size // 2)])
        self.reach = Reach.of(partial(self.decode, seed=0), some, _MOST_FRAMES)

    @classmethod
    def load(cls, name: str) -> SnacCodec:
        """A folder, or a name on the hub, as `SNAC.from_pretrained` takes it.

        Raises:
            ImportError: the package `snac` is not installed.
            OSError: the weights are not there.
        """
        from snac import SNAC

        return cls(SNAC.from_pretrained(name))

    @property
    def rate(self) -> int:
        """Samples a second."""
        return int(self.model.sampling_rate)

    @property
    def frame_samples(self) -> int:
        """Of a frame."""
        return int(self.model.hop_length) * 4

    def stream(self, seed: int) -> Windowed:
        """A new stream, with noise of its own."""
        return Windowed(partial(self.decode, seed=seed), self.reach)

    @torch.inference_mode()
    def decode(self, frames: Frames, first: int, seed: int) -> Floats:
        """Samples `[F * frame_samples]` of `frames [F, FRAME_CODES]`.

        Args:
            first: number of the first of them in its stream.
            seed: the noise's.
        """
        self._place.seed, self._place.first, self._place.count = seed, first, len(frames)
        codes = [torch.from_numpy(frames[:, columns].reshape(1, -1)) for columns in ORDER]
        return np.asarray(self.model.decode(codes)[0, 0].float().numpy())


class _PlacedNoise(nn.Module):
    """As SNAC's `NoiseBlock`, with noise that belongs to the frames."""

    def __init__(self, linear: nn.Module, number: int, place: _Place) -> None:
        super().__init__()
        self.linear, self._number, self._place = linear, number, place

    def forward(self, x: Tensor) -> Tensor:
        place = self._place
        of_frame = x.shape[-1] // place.count
        noise = np.concatenate(
            [
                np.random.default_rng([place.seed, self._number, frame]).standard_normal(of_frame)
                for frame in range(place.first, place.first + place.count)
            ]
        )
        return x + torch.from_numpy(noise).to(x) * self.linear(x)
