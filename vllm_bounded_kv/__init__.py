"""KV memory of a fixed size per request: a kept sink, a sliding window, never a byte more.

Importing this package has no side effect. What is exported here is what a model declares; the
arithmetic is in `layout`, attention in `attention`. None of them imports a serving engine.
"""

from vllm_bounded_kv.config import (
    BoundedKVConfig,
    BoundedKVSpec,
    BoundedKVStep,
    SinkWindow,
    StreamPosition,
)

__all__ = [
    "BoundedKVConfig",
    "BoundedKVSpec",
    "BoundedKVStep",
    "SinkWindow",
    "StreamPosition",
]
