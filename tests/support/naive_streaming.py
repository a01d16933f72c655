"""StreamingLLM as its paper tells it: one token at a time, a list for a cache, no shortcut.

Keys are appended unrotated; a list that has grown beyond the cache loses its oldest entry after
the sink; then every key is rotated by its place in the list, and the query by the last.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

PlaceFn = Callable[[int, int], Tensor]
"""(entries in the cache, tokens read before) -> the position each entry is rotated by."""


def by_cache_index(num_entries: int, num_read: int) -> Tensor:
    return torch.arange(num_entries)


def by_stream_position(num_entries: int, num_read: int) -> Tensor:
    """Not StreamingLLM: as if the entries in the cache were the stream's last ones."""
    return torch.arange(num_entries) + num_read + 1 - num_entries


def naive_streaming_nats(
    config: dict[str, Any],
    weights: dict[str, Tensor],
    tokens: Sequence[int],
    sink: int,
    window: int,
    place: PlaceFn = by_cache_index,
) -> Tensor:
    """Negative log-likelihood of every token but the first: `[n - 1]` float64.

    `config` and `weights` are a Hugging Face Llama's; the window counts the query's own entry.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    layers = range(config["num_hidden_layers"])
    head_dim, theta = config["head_dim"], config["rope_parameters"]["rope_theta"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + config["rms_norm_eps"]).sqrt() * w[name + ".weight"]

    def rotate(x: Tensor, position: Tensor) -> Tensor:
        """`x [..., head_dim]` by `position [...]`, element by element."""
        out = torch.empty_like(x)
        for i in range(head_dim // 2):
            angle = position * theta ** (-2 * i / head_dim)
            a, b = x[..., i], x[..., i + head_dim // 2]
            out[..., i] = a * angle.cos() - b * angle.sin()
            out[..., i + head_dim // 2] = a * angle.sin() + b * angle.cos()
        return out

    nats = []
    for num_read, token in enumerate(tokens[:-1]):
        x = w["model.embed_tokens.weight"][token]
        for layer in layers:
            prefix = f"model.layers.{layer}."
            y = norm(x, prefix + "input_layernorm")
            q, k, v = (
                (w[f"{prefix}self_attn.{name}_proj.weight"] @ y).view(-1, head_dim)
                for name in "qkv"
            )
            cache = caches[layer]
            cache.append((k, v))
            if len(cache) > sink + window:
                del cache[sink]
            places = place(len(cache), num_read).double()
            keys = torch.stack([entry[0] for entry in cache])
            values = torch.stack([entry[1] for entry in cache])
            heads = []
            for head, query in enumerate(rotate(q, places[-1].expand(len(q)))):
                scores = rotate(keys[:, head // group], places) @ query / math.sqrt(head_dim)
                heads.append(scores.softmax(0) @ values[:, head // group])
            x = x + w[prefix + "self_attn.o_proj.weight"] @ torch.cat(heads)
            y = norm(x, prefix + "post_attention_layernorm")
            gate = silu(w[prefix + "mlp.gate_proj.weight"] @ y)
            up = w[prefix + "mlp.up_proj.weight"] @ y
            x = x + w[prefix + "mlp.down_proj.weight"] @ (gate * up)
        logits = w["lm_head.weight"] @ norm(x, "model.norm")
        nats.append(-logits.log_softmax(0)[tokens[num_read + 1]])
    return torch.stack(nats)
