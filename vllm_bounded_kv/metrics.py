"""Prometheus metrics, `bounded_kv_*`, on vLLM's own `/metrics`.

The figures are made in the engine core. An API server fetches them when it is scraped, so what is
shown is what is; counters are handed out as differences, so several API servers (whose registries
Prometheus's multi-process mode adds up) never count anything twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge

GAUGES = {
    "slots": ("slots_total", "Slots of the largest size that may be held at once."),
    "slots_used": ("slots_used", "Streams that hold a slot."),
    "slot_bytes": ("slot_bytes", "Bytes of one slot of the largest size."),
    "pool_blocks": ("pool_blocks", "Blocks of the pool that streams can hold."),
    "pool_blocks_free": ("pool_blocks_free", "Blocks that no stream holds."),
    "source_blocks_held": ("source_blocks_held", "Distinct shareable blocks that streams hold."),
    "source_blocks_shared": ("source_blocks_shared", "Those held by more than one stream."),
}


@dataclass(frozen=True)
class _Metrics:
    gauges: Mapping[str, Gauge]
    ring_wraps: Counter
    refusals: Counter


@functools.cache
def _metrics() -> _Metrics:
    """Created on first use: a stock server shows none of them."""
    return _Metrics(
        gauges={
            figure: Gauge(f"bounded_kv_{name}", text, multiprocess_mode="mostrecent")
            for name, (figure, text) in GAUGES.items()
        },
        ring_wraps=Counter("bounded_kv_ring_wraps", "Times a stream's ring has started over."),
        refusals=Counter("bounded_kv_refusals", "Requests refused.", ["reason"]),
    )


REASONS = frozenset({"kv_source_len", "kv_sink", "kv_window"})
OTHER_REASON = "unknown_argument"


def create() -> None:
    """Make the metrics exist, every series at zero."""
    for reason in (*REASONS, OTHER_REASON):
        _metrics().refusals.labels(reason)


def update(figures: Mapping[str, Any]) -> None:
    """Take over the engine's figures, read with `mark_read`."""
    metrics = _metrics()
    for figure, gauge in metrics.gauges.items():
        gauge.set(figures[figure])
    metrics.ring_wraps.inc(figures["ring_wraps_unread"])


def count_refusal(reason: str) -> None:
    """Count a refused request by the argument at fault; unknown ones share a label."""
    _metrics().refusals.labels(reason if reason in REASONS else OTHER_REASON).inc()
