"""The engine's figures as plain data: made in the engine core, shown by API servers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StreamFigures:
    """One running stream."""

    request_id: str
    position: int
    """Entries the stream has been given so far."""
    retained: int
    evicted: int
    blocks: int
    """Blocks of its slot, shared ones included: constant over its life."""
    sink: int
    window: int


@dataclass(frozen=True)
class EngineFigures:
    """The cache of one engine at one moment."""

    slots_total: int
    """Largest slots that may be held at once, nothing shared."""
    slots_used: int
    slot_bytes: int
    slot_blocks: int
    block_size: int
    block_bytes: int
    pool_blocks: int
    """Blocks of the pool that requests can hold."""
    pool_blocks_free: int
    source_blocks_held: int
    """Distinct hashed blocks that running streams hold."""
    source_blocks_shared: int
    """Those of them that more than one stream holds."""
    sources: int
    """Names of pinned sources, of all tenants."""
    pinned_blocks: int
    """Distinct blocks that they hold."""
    max_pinned_blocks: int
    ring_wraps: int
    """Times any stream's ring has started over, since start-up."""
    ring_wraps_unread: int
    """Those not yet handed to a metrics reader."""
    streams: list[StreamFigures] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON and between processes."""
        return asdict(self)
