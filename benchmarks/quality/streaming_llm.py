"""StreamingLLM's own scheme in plain PyTorch: the reference that `rebase` is measured against.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023, arXiv 2309.17453),
section 3.2: keys are cached before their rotary embedding, and are rotated by their index *in the
cache* whenever they are attended. A query at stream position `p` sees the first `sink` entries and
the last `window`, its own included, so its own index is `min(p, sink + window - 1)`.

Token by token that costs a step a token. Here a chunk of queries goes at once: a rotary score
depends on the difference of two indices alone. Between a query and an entry of its window that is
their distance in the stream; only the sink is nearer than it was, so queries are rotated twice.

A Llama of its own, from the checkpoint: it shares no code with the plugin or its tests' oracle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.quality.checkpoint import EVERY, Checkpoint

CHUNK = 256
"""Queries at a time: more of them score more keys that they may not see."""


@dataclass(frozen=True)
class LlamaShape:
    """What a checkpoint's `config.json` says beside its weights."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LlamaShape:
        """Read a Hugging Face config.

        Raises:
            ValueError: for anything but a plain Llama, naming the field and its value.
        """
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        for field, value, known in (
            ("model_type", config.get("model_type"), "llama"),
            ("rope_type", rope.get("rope_type", "default"), "default"),
            ("hidden_act", config.get("hidden_act", "silu"), "silu"),
            ("attention_bias", config.get("attention_bias", False), False),
            ("mlp_bias", config.get("mlp_bias", False), False),
        ):
            if value != known:
                raise ValueError(f"{field}={value!r}: the reference knows only {known!r}")
        heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
        )


@dataclass(frozen=True)
class _Chunk:
    """Where the queries and keys of a chunk stand, the same for every layer.

    `T` queries; `m` entries kept from before, then the chunk's own `T`, `n = m + T` in all.
    """

    num_sink: int
    """Of the `n` entries, how many lead as sink."""
    query_turn: tuple[Tensor, Tensor]
    """Against the window: cosines and sines, `[T, head_dim / 2]` each."""
    query_turn_to_sink: tuple[Tensor, Tensor]
    key_turn: tuple[Tensor, Tensor]
    """`[n, head_dim / 2]` each."""
    mask: Tensor
    """`[T, n]`, 0 where the query sees the entry, else -inf."""
    kept: Tensor
    """`[k]` int64: which of the `n` entries the next chunk needs."""


class StreamingLlama:
    """A Llama that reads a stream of any length with StreamingLLM's cache."""

    def __init__(self, shape: LlamaShape, weights: dict[str, Tensor]) -> None:
        """`weights`: checkpoint tensors by their Hugging Face names, all of one float dtype."""
        self.shape = shape
        self.weights = weights
        self.embedding = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)

    @classmethod
    def from_folder(cls, folder: Path | str, dtype: torch.dtype = torch.float32) -> StreamingLlama:
        """Read `config.json` and `*.safetensors`; `ValueError` for what is no plain Llama."""
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        shape = LlamaShape.from_config(config)
        weights: dict[str, Tensor] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            weights |= {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
        return cls(shape, weights)

    @torch.inference_mode()
    def score(
        self,
        tokens: Sequence[int],
        sink: int,
        window: int,
        chunk: int = CHUNK,
        on_progress: Callable[[int], None] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Tensor:
        """Negative log-likelihood of every token but the first, given those that the cache keeps.

        Args:
            tokens: `n` ids, at least two.
            sink: entries kept from the start, >= 0.
            window: last entries kept, the query's own included, >= 1.
            chunk: queries at a time; changes no result.
            on_progress: called with the number of tokens scored so far.
            checkpoint: to go on from, and to leave behind now and then.

        Returns:
            `[n - 1]` in nats, in the weights' dtype.
        """
        if len(tokens) < 2 or sink < 0 or window < 1 or chunk < 1:
            raise ValueError(
                f"tokens={len(tokens)} (at least 2), sink={sink} (at least 0), "
                f"window={window}, chunk={chunk} (at least 1)"
            )
        ids = torch.tensor(tokens)
        empty = self.embedding.new_empty(0, self.shape.num_kv_heads, self.shape.head_dim)
        caches = [(empty, empty)] * self.shape.num_layers
        out = self.embedding.new_empty(len(ids) - 1)
        begin = 0
        if checkpoint is not None and (found := checkpoint.load()) is not None:
            scored, caches = found
            begin = len(scored)
            out[:begin] = scored
        saved = begin
        for start in range(begin, len(out), chunk):
            stop = min(start + chunk, len(out))
            logits = self._forward(ids[start:stop], self._place(start, stop, sink, window), caches)
            out[start:stop] = F.cross_entropy(logits, ids[start + 1 : stop + 1], reduction="none")
            if checkpoint is not None and stop - saved >= EVERY:
                checkpoint.save(out[:stop], caches)
                saved = stop
            if on_progress is not None:
                on_progress(stop)
        return out

    def _place(self, start: int, stop: int, sink: int, window: int) -> _Chunk:
        """The chunk of queries `[start, stop)` of the stream."""
        query = torch.arange(start, stop)
        entry = torch.cat([torch.arange(min(sink, start)), _window(start, sink, window), query])
        in_sink = entry < sink
        sees = entry <= query[:, None]
        sees &= in_sink | (entry > query[:, None] - window)
        return _Chunk(
            num_sink=int(in_sink.sum()),
            query_turn=self._turn(query - start),
            query_turn_to_sink=self._turn(query.clamp(max=sink + window - 1)),
            key_turn=self._turn(torch.where(in_sink, entry, entry - start)),
            mask=torch.zeros(sees.shape, dtype=self.embedding.dtype).masked_fill(~sees, -math.inf),
            kept=(in_sink | (entry > stop - window)).nonzero().squeeze(1),
        )

    def _turn(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `[n]` indices, `[n, head_dim / 2]`; angles are float64."""
        half = self.shape.head_dim // 2
        frequency = self.shape.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = index[:, None] * frequency
        return angle.cos().to(self.embedding.dtype), angle.sin().to(self.embedding.dtype)

    def _forward(self, ids: Tensor, place: _Chunk, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits `[T, vocab]` of a chunk `[T]`; `caches` move on to the next chunk in place."""
        x = self.embedding[ids]
        for layer in range(self.shape.num_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm")
            attended, caches[layer] = self._attend(
                normed, prefix + "self_attn.", place, caches[layer]
            )
            x = x + attended
            normed = self._norm(x, prefix + "post_attention_layernorm")
            x = x + self._mlp(normed, prefix + "mlp.")
        return F.linear(self._norm(x, "model.norm"), self.head)

    def _attend(
        self, x: Tensor, prefix: str, place: _Chunk, cache: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`[T, hidden]` -> `[T, hidden]`, and the cache (keys unrotated) for the next chunk."""
        q, k, v = (
            self._linear(x, f"{prefix}{name}_proj").unflatten(1, (-1, self.shape.head_dim))
            for name in "qkv"
        )
        keys, values = torch.cat([cache[0], k]), torch.cat([cache[1], v])
        rotated = _rotate(keys, place.key_turn).permute(1, 2, 0)  # [H_kv, D, n]
        to_sink = self._grouped(_rotate(q, place.query_turn_to_sink))
        to_window = self._grouped(_rotate(q, place.query_turn))
        scores = torch.cat(
            [to_sink @ rotated[..., : place.num_sink], to_window @ rotated[..., place.num_sink :]],
            dim=-1,
        )  # [H_kv, group * T, n]
        scores = scores.unflatten(1, (-1, len(x))) / math.sqrt(self.shape.head_dim) + place.mask
        weights = scores.softmax(-1).flatten(1, 2)
        out = (weights @ values.transpose(0, 1)).unflatten(1, (-1, len(x)))
        out = out.permute(2, 0, 1, 3).flatten(1)
        return self._linear(out, prefix + "o_proj"), (keys[place.kept], values[place.kept])

    def _grouped(self, q: Tensor) -> Tensor:
        """`[T, H, D]` -> `[H_kv, group * T, D]`: the query heads of a KV head side by side."""
        return q.unflatten(1, (self.shape.num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate = F.silu(self._linear(x, prefix + "gate_proj"))
        return self._linear(gate * self._linear(x, prefix + "up_proj"), prefix + "down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.shape.norm_eps).rsqrt()
        return x * scale * self.weights[name + ".weight"]


def _window(start: int, sink: int, window: int) -> Tensor:
    """Entries beyond the sink, before `start`, that the query at `start` sees: `[m]` int64."""
    return torch.arange(max(min(sink, start), start - window + 1), start)


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn `x [n, heads, D]`, whose element `i` is paired with `i + D / 2`."""
    cos, sin = (part[:, None] for part in turn)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
