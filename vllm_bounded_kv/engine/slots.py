"""How many slots a pool of blocks holds, and what one takes: said once, for the worker that gives
the memory, the scheduler that admits streams, the start-up line, and `bounded-kv size`.

Imports no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_bounded_kv.engine.policy import EnginePolicy, PolicyError
from vllm_bounded_kv.engine.slot_size import SlotSize


@dataclass(frozen=True)
class Slots(SlotSize):
    """A pool of blocks, divided. As text it is the start-up line."""

    pool_blocks: int
    """Blocks that streams can hold: vLLM's null block is none of them."""
    num_slots: int
    """Slots of the largest size that may be held at once, nothing shared."""
    max_pinned_blocks: int

    def __str__(self) -> str:
        largest, limit = self.policy.largest, self.policy.position_limit
        positions = f"rebase, falling back at {limit:,}" if limit else "absolute"
        return (
            f"Bounded KV cache: {self.slot_bytes:,} bytes a slot (sink {largest.sink} + window "
            f"{largest.ring} entries in {self.slot_blocks} blocks of {self.block_size}); "
            f"{self.num_slots} slots in a pool of {self.pool_blocks} blocks; "
            f"{self.source_blocks} source blocks a stream can share; "
            f"{self.max_pinned_blocks} blocks can be pinned. Rotary positions: {positions}."
        )


def blocks_in(memory: int, policy: EnginePolicy, block_size: int, block_bytes: int) -> int:
    """Blocks that streams can hold in a worker's cache memory, vLLM's null block taken off.

    Args:
        memory: bytes.
        policy: resolved.
        block_size: entries of a block.
        block_bytes: of the worker's layers and heads.

    Raises:
        PolicyError: when they are fewer than one slot's.
    """
    num_blocks = memory // block_bytes
    needed = policy.largest.num_blocks(block_size) + 1
    if num_blocks < needed:
        raise PolicyError(
            "sink + window",
            policy.largest.capacity,
            f"needs {needed} blocks of {block_size} entries, but the cache memory "
            f"({memory:,} bytes) holds {num_blocks}; lower --bounded-kv-window, or raise "
            "--kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE on CPU)",
        )
    return num_blocks - 1


def divide(
    policy: EnginePolicy,
    *,
    block_size: int,
    block_bytes: int,
    pool_blocks: int,
    max_active: int | None = None,
) -> Slots:
    """Divide a pool into slots and what is left for pinned sources.

    Args:
        policy: resolved.
        block_size: entries of a block.
        block_bytes: of all layers and workers.
        pool_blocks: blocks that streams can hold.
        max_active: requests that the scheduler admits at once; `None`: any number.

    Raises:
        PolicyError: when the pool cannot hold the slots that the policy asks for, or one.
    """
    slot_blocks = policy.largest.num_blocks(block_size)
    wanted, max_pinned = policy.max_slots, policy.max_pinned_blocks
    pool_slots = (pool_blocks - (max_pinned or 0)) // slot_blocks
    if pool_slots < max(wanted or 1, 1):
        beside = f" beside {max_pinned} for pinned sources" if max_pinned else ""
        field: tuple[str, Any] = ("--bounded-kv-window", policy.window)
        if max_pinned and pool_blocks // slot_blocks >= (wanted or 1):
            field = ("--bounded-kv-max-pinned-blocks", max_pinned)
        elif wanted:
            field = ("--bounded-kv-max-slots", wanted)
        raise PolicyError(
            *field,
            f"needs {(wanted or 1) * slot_blocks} blocks of {block_size} entries "
            f"({slot_blocks} a slot){beside}, but the pool has {pool_blocks}; lower it, "
            "or give the cache more memory (--kv-cache-memory-bytes, or VLLM_CPU_KVCACHE_SPACE "
            "on CPU)",
        )
    num_slots = min(n for n in (pool_slots, wanted, max_active) if n is not None)
    if max_pinned is None:
        can_pin = policy.max_source_len >= block_size
        max_pinned = pool_blocks - num_slots * slot_blocks if can_pin else 0
    return Slots(policy, block_size, block_bytes, pool_blocks, num_slots, max_pinned)
