"""The transformer of Mimi's decoder (the codec of Moshi) over the slot pool.

Run it: `OMP_NUM_THREADS=1 .venv/bin/python -m examples.streaming_decoders.mimi`. The model is
transformers' `MimiModel`, small, with random weights; its layers run as they are.

What Mimi needs of the pool:

* Its mask lets a token see `sliding_window` tokens, itself included: distances 0 to
  `sliding_window - 1`. That is a `query_window` of `sliding_window - 1`, and as many entries kept.
* Keys are stored after their rotation, each by its own place in its own stream, so streams of any
  age share a batch.
* A step is causal within itself. So a stream with less to say than the others is padded at its
  end: the padding is seen by nobody and, being beyond the stream's `span`, is not stored.
* An intro that many streams begin with is a source: computed once, read by all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, MimiConfig, MimiModel

from examples.streaming_decoders.explicit import Attend, ExplicitCache, no_entries
from examples.streaming_decoders.prefixes import Prefix, prefix_len, stack_prefixes
from examples.streaming_decoders.traffic import Traffic, show
from vllm_bounded_kv import (
    BoundedKVConfig,
    BoundedKVSpec,
    BoundedKVStep,
    SinkWindow,
    StreamPosition,
)
from vllm_bounded_kv.manager import BoundedKVManager
from vllm_bounded_kv.step_plan import StepPlan


def small_config(**others: Any) -> MimiConfig:
    """Of a Mimi whose random weights are large ones, for attention to matter."""
    return MimiConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        sliding_window=9,
        initializer_range=0.3,
        layer_scale_initial_scale=1.0,
        num_filters=4,
        upsampling_ratios=[4, 2],
        upsample_groups=32,
        codebook_size=16,
        codebook_dim=8,
        vector_quantization_hidden_dimension=8,
        num_quantizers=4,
        **others,
    )


def small_mimi(seed: int = 0) -> MimiModel:
    """Mimi with random weights, in float64."""
    AttentionInterface.register("given", _given_attention)
    torch.manual_seed(seed)
    model = MimiModel(small_config()).double().eval()
    model.set_attn_implementation("given")
    return model


def _given_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, *, attend: Attend, **_: Any
) -> tuple[Tensor, None]:
    """Transformers' attention interface, to which ours is made to fit: `k` comes rotated."""
    return attend(module.layer_idx, q, k, v), None


def run_transformer(model: MimiModel, x: Tensor, start: Tensor, attend: Attend) -> Tensor:
    """Mimi's own layers: `x [B, T, C]`, whose rows begin at `start [B]` of their streams."""
    transformer = model.decoder_transformer
    positions = start[:, None] + torch.arange(x.shape[1])
    rotation = transformer.rotary_emb(x, positions)
    for layer in transformer.layers:
        x = layer(x, position_embeddings=rotation, attend=attend)[0]
    return x


def kv_shape(config: MimiConfig) -> tuple[int, int, int, int]:
    """Layers, rows, KV heads, head dimension."""
    assert config.head_dim is not None  # transformers has filled it in
    return config.num_hidden_layers, 1, config.num_key_value_heads, config.head_dim


def spec_of(config: MimiConfig, max_slots: int, max_source_len: int) -> BoundedKVSpec:
    """What Mimi declares."""
    layers, rows, kv_heads, head_dim = kv_shape(config)
    query_window = config.sliding_window - 1
    return BoundedKVSpec(
        BoundedKVConfig(
            num_layers=layers,
            num_heads=kv_heads,
            head_dim=head_dim,
            rows_per_request=rows,
            max_source_len=max_source_len,
            retention=SinkWindow(sink=0, window=query_window),
            query_window=query_window,
            max_slots=max_slots,
            dtype=torch.float64,
        )
    )


class PooledMimi:
    """Streams of Mimi, in a pool."""

    def __init__(self, model: MimiModel, intros: Sequence[Prefix], max_slots: int = 4) -> None:
        """Serve `model`; a stream may go on from any of the `intros`."""
        self.model = model
        self.spec = spec_of(model.config, max_slots, max(map(prefix_len, intros)))
        self.manager = BoundedKVManager.build(self.spec)
        self.managers = [self.manager]
        self.intros = intros
        self.sources = stack_prefixes(intros)
        self.plan = StepPlan(max_slots)  # filled anew for each step; a short batch is padded
        self.positions: dict[str, StreamPosition] = {}

    def open(self, name: str, intro: int) -> None:
        """Begin a stream. It gets its slot with its first chunk."""
        self.positions[name] = StreamPosition(prefix_len(self.intros[intro]), 0, source=intro)

    def close(self, name: str) -> None:
        """End a stream, and give its slot to another."""
        del self.positions[name]
        self.manager.release(name)

    def step(self, chunks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One chunk `[t, C]` of each of some streams, `t` of its own, to `[t, C]`."""
        # 1. Who takes part, and how many tokens each adds.
        segments = [(name, len(chunk)) for name, chunk in chunks.items()]
        step = BoundedKVStep(segments, {name: self.positions[name] for name in chunks})
        # 2. A slot for everyone who has none. A server would let those wait that are refused.
        if refusals := self.manager.admit(step):
            raise RuntimeError(refusals[0].message)
        # 3. What each reads and writes: once for all layers.
        plan = self.manager.plan(step, into=self.plan)
        # 4. The model. Every layer attends and stores.
        num_tokens = max(span for _, span in segments)
        size = (len(plan), num_tokens, self.model.config.hidden_size)
        x = torch.zeros(size, dtype=torch.float64)
        start = torch.zeros(len(plan), dtype=torch.long)
        for row, (name, span) in enumerate(segments):
            x[row, :span] = chunks[name]
            start[row] = self.positions[name].num_entries
        y = run_transformer(self.model, x, start, partial(self._attend, plan))
        # 5. The streams have grown.
        self.manager.commit(step)
        for name, span in segments:
            position = self.positions[name]
            self.positions[name] = replace(position, written=position.written + span)
        return {name: y[row, :span] for row, (name, span) in enumerate(segments)}

    def _attend(
        self,
        plan: StepPlan,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rel_bias: Tensor | None = None,
    ) -> Tensor:
        return self.manager.attend(
            layer, q, k, v, sources=self.sources[layer], plan=plan, rel_bias=rel_bias
        )


class ExplicitMimi:
    """One stream of Mimi, with all it ever had in its caches."""

    def __init__(self, model: MimiModel, intro: Prefix | None = None) -> None:
        """Begin a stream, after an intro if there is one."""
        config = model.config
        self.model = model
        self.cache = ExplicitCache(
            list(intro) if intro else no_entries(*kv_shape(config)),
            # The mask alone decides here; nothing is ever dropped.
            SinkWindow(0, config.sliding_window - 1),
            query_window=config.sliding_window - 1,
        )

    @property
    def num_entries(self) -> int:
        """Of the stream."""
        return self.cache.num_entries

    def step(self, chunk: Tensor) -> Tensor:
        """The next chunk: `[t, C]` to `[t, C]`."""
        attend = partial(self.cache.attend, span=len(chunk))
        start = torch.tensor([self.num_entries])
        return run_transformer(self.model, chunk[None], start, attend)[0]


@torch.no_grad()
def intro_of(model: MimiModel, x: Tensor) -> Prefix:
    """The prefix of streams that begin with `x [t, C]`; of no tokens, if they begin with none."""
    stream = ExplicitMimi(model)
    if len(x):
        stream.step(x)
    return stream.cache.entries


def traffic(model: MimiModel, seed: int = 0) -> Traffic[Tensor]:
    """Streams with intros of 0, 5 and 13 tokens (more than Mimi looks back), in 4 slots."""
    random = torch.Generator().manual_seed(seed)

    def normal(num_tokens: int) -> Tensor:
        size = (num_tokens, model.config.hidden_size)
        return torch.randn(size, generator=random, dtype=torch.float64)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    intros = [intro_of(model, normal(length)) for length in (0, 5, 13)]
    pooled = PooledMimi(model, intros)

    def open_stream(name: str) -> ExplicitMimi:
        intro = number(0, len(intros) - 1)
        pooled.open(name, intro)
        return ExplicitMimi(model, intros[intro])

    return Traffic(
        pooled, open_stream, lambda streams: [normal(number(1, 7)) for _ in range(streams)], seed
    )


def main() -> None:
    """Serve random streams, and say how far they are from explicit caches."""
    model = small_mimi()
    served = traffic(model)
    served.run(100)
    show(served, [spec_of(model.config, max_slots=4, max_source_len=13)])
    full = spec_of(MimiConfig(), max_slots=1, max_source_len=0)
    full.config = full.config.with_dtype(torch.bfloat16)
    size = BoundedKVManager.memory_bytes(full)
    print(f"Mimi as published, in bfloat16: {size:,} bytes a stream")


if __name__ == "__main__":
    main()
