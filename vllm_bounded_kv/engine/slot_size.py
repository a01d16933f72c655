"""What a slot takes: the engine divides its memory by it, and `bounded-kv size` foretells it.

Imports no torch: the tools must be able to say that there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_bounded_kv.engine.policy import EnginePolicy


@dataclass(frozen=True)
class SlotSize:
    """What the largest slot takes."""

    policy: EnginePolicy
    """Resolved."""
    block_size: int
    """Entries of a block."""
    block_bytes: int
    """Of all layers and all tensor-parallel workers."""

    @property
    def slot_blocks(self) -> int:
        """Its blocks."""
        return self.policy.largest.num_blocks(self.block_size)

    @property
    def slot_bytes(self) -> int:
        """Their bytes."""
        return self.slot_blocks * self.block_bytes

    @property
    def source_blocks(self) -> int:
        """Those of its blocks that streams over one source can share."""
        return self.policy.largest.num_immutable_blocks(self.block_size)
