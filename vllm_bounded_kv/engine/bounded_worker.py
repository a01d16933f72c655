"""What a worker of any device does: bound every layer's cache, and refuse what cannot be bounded.

Imports no worker of vLLM's: the CPU's replaces parts of torch as it is imported, streams and events
of CUDA among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_bounded_kv.engine import compat
from vllm_bounded_kv.engine.refusals import UnsupportedError
from vllm_bounded_kv.engine.settings import policy_of
from vllm_bounded_kv.engine.slots import blocks_in
from vllm_bounded_kv.engine.spec import BoundedAttentionSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerBase as _Worker
else:
    _Worker = object


class BoundedWorkerMixin(_Worker):
    """Put before vLLM's worker of the device."""

    backend: ClassVar[Any]
    """The attention backend, whose `customize_spec` bounds layers while its `policy` is set."""
    vllm_config: VllmConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        compat.drain_notifications()
        policy = policy_of(self.vllm_config)
        assert policy is not None
        self.bounded_policy = policy
        self.specs: dict[str, KVCacheSpec] = {}
        """Of every attention layer, by its name."""

    def has_shared_layers(self) -> bool:
        """Whether layers read other layers' caches."""
        raise NotImplementedError

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Every layer's spec, bounded.

        Raises:
            UnsupportedError: when a layer's cache is of a kind the plugin cannot bound.
        """
        before, self.backend.policy = self.backend.policy, self.bounded_policy
        try:
            specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        finally:
            self.backend.policy = before
        if self.has_shared_layers():
            raise UnsupportedError("cross-layer KV sharing", "Serve it without --kv-plugin.")
        for name, spec in specs.items():
            if not isinstance(spec, BoundedAttentionSpec):
                raise UnsupportedError(
                    f"layer {name!r}, whose cache is a {type(spec).__name__}",
                    "Serve this model without --kv-plugin.",
                )
        self.specs = specs
        return specs

    def determine_available_memory(self) -> int:
        """vLLM's figure, checked against one slot before vLLM explains the shortage in terms of
        a model length that does not matter here."""
        available: int = super().determine_available_memory()  # type: ignore[misc]
        specs = [s for s in self.specs.values() if isinstance(s, BoundedAttentionSpec)]
        block_bytes = sum(s.page_size_bytes for s in specs)
        blocks_in(available, self.bounded_policy, specs[0].block_size, block_bytes)
        return available
