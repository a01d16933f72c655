"""Decoders of `transformers`' codecs for streams: DAC, EnCodec and Mimi.

DAC's is convolutions alone. EnCodec's has an LSTM behind its first, and Mimi's a transformer behind
its upsampling: those parts keep a state, and what is around them is run on windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bounded_kv_server.codec_model import Codec
from bounded_kv_server.windowed import Chain, Decode, Frames, Reach, Recurrent, Windowed

_MOST_FRAMES = 40


def load(folder: str, num_codebooks: int) -> Codec:
    """The codec of a folder, or of a name on the hub.

    Args:
        num_codebooks: codes of a frame.

    Raises:
        OSError: it is not there.
        ValueError: it is none of the three, or has fewer codebooks.
    """
    from transformers import AutoConfig, AutoModel

    kind = AutoConfig.from_pretrained(folder).model_type
    if kind not in _KINDS:
        raise ValueError(f"codec {folder}: is of type {kind!r}; must be one of {sorted(_KINDS)}")
    return codec_of(AutoModel.from_pretrained(folder), num_codebooks)


def codec_of(model: Any, num_codebooks: int) -> Codec:
    """A codec in memory; see `load`."""
    config = model.config
    most = getattr(config, "n_codebooks", None) or getattr(config, "num_quantizers", None)
    if most is not None and not 1 <= num_codebooks <= most:
        raise ValueError(f"codebooks {num_codebooks}: the codec has {most}")
    model.eval().requires_grad_(False)
    two = np.stack([np.zeros(num_codebooks, np.int64), np.ones(num_codebooks, np.int64)])
    make, frame_samples = _KINDS[config.model_type](model, two)
    return Codec(int(config.sampling_rate), frame_samples, lambda seed: make())


def _windows(decode: Decode, two: Frames) -> Callable[[], Windowed]:
    reach = Reach.of(decode, two, _MOST_FRAMES)
    return lambda: Windowed(decode, reach)


def _module(module: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Decode:
    """`[1, D, F]` to `[1, D', F * n]`, as frames."""

    @torch.inference_mode()
    def decode(frames: Frames, first: int) -> Frames:
        x = torch.from_numpy(np.ascontiguousarray(frames)).to(dtype)
        found = module(x.T[None])[0].T
        return np.asarray(found.numpy())

    return decode


def _some(size: int) -> Frames:
    return np.random.default_rng(0).normal(size=(2, size))


def _samples(decode: Decode) -> Decode:
    """One channel, `[N]`."""
    return lambda frames, first: decode(frames, first)[:, 0]


def _dac(model: Any, two: Frames) -> tuple[Callable[[], Windowed], int]:
    @torch.inference_mode()
    def decode(frames: Frames, first: int) -> Frames:
        codes = torch.from_numpy(np.ascontiguousarray(frames.T))[None]
        found = model.decoder(model.quantizer.from_codes(codes)[0])
        return np.asarray(found[0, 0].numpy())

    return _windows(decode, two), int(model.config.hop_length)


def _encodec(model: Any, two: Frames) -> tuple[Callable[[], Chain], int]:
    if model.config.normalize or model.config.norm_type != "weight_norm":
        raise ValueError("this EnCodec normalises over time: it cannot be streamed")
    dtype = next(model.parameters()).dtype
    first, lstm, *rest = model.decoder.layers

    @torch.inference_mode()
    def embed(frames: Frames, at: int) -> Frames:
        codes = torch.from_numpy(np.ascontiguousarray(frames.T))[:, None]
        return np.asarray(first(model.quantizer.decode(codes))[0].T.numpy())

    @torch.inference_mode()
    def recur(frames: Frames, state: Any) -> tuple[Frames, Any]:
        x = torch.from_numpy(frames).to(dtype)[:, None]
        found, state = lstm.lstm(x, state)
        return (found + x)[:, 0].numpy(), state

    late = _samples(_module(nn.Sequential(*rest), dtype))
    begin, end = _windows(embed, two), _windows(late, _some(lstm.lstm.hidden_size))
    samples = int(np.prod(model.config.upsampling_ratios))
    return lambda: Chain([begin(), Recurrent(recur), end()]), samples


def _mimi(model: Any, two: Frames) -> tuple[Callable[[], Chain], int]:
    from transformers import DynamicCache

    config = model.config
    dtype = next(model.parameters()).dtype

    @torch.inference_mode()
    def embed(frames: Frames, at: int) -> Frames:
        codes = torch.from_numpy(np.ascontiguousarray(frames.T))[None]
        return np.asarray(model.upsample(model.quantizer.decode(codes))[0].T.numpy())

    @torch.inference_mode()
    def recur(frames: Frames, state: Any) -> tuple[Frames, Any]:
        # The cache is the model's own: it keeps the window, and counts the positions.
        state = state or DynamicCache(config=config)
        x = torch.from_numpy(frames).to(dtype)[None]
        found = model.decoder_transformer(
            x, past_key_values=state, use_cache=True, return_dict=True
        )
        return found.last_hidden_state[0].numpy(), state

    late = _samples(_module(model.decoder, dtype))
    begin, end = _windows(embed, two), _windows(late, _some(config.hidden_size))
    samples = round(config.sampling_rate / config.frame_rate)
    return lambda: Chain([begin(), Recurrent(recur), end()]), samples


_KINDS: dict[str, Callable[[Any, Frames], tuple[Callable[[], Any], int]]] = {
    "dac": _dac,
    "encodec": _encodec,
    "mimi": _mimi,
}
