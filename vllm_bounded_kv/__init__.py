"""KV memory of a fixed size per request: a kept sink, a sliding window, never a byte more.

Importing this package has no side effect. What is exported here is what a model declares; the
arithmetic is in `layout`, attention in `attention`. None of them imports a serving engine.

What is exported is imported when it is asked for: `bounded-kv doctor` must run without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("vllm_bounded_kv.config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
