"""Prometheus metrics, `bounded_kv_*`, on vLLM's own `/metrics`.

The figures are made in the engine core. An API server fetches them when it is scraped, so what is
shown is what is; counters are handed out as differences, so several API servers (whose registries
Prometheus's multi-process mode adds up) never count anything twice. What an engine core says
carries the label `engine`, as vLLM's own metrics do: the replica's number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
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
    "sources": ("sources", "Names of pinned sources."),
    "pinned_blocks": ("pinned_blocks", "Distinct blocks that pinned sources hold."),
    "max_pinned_blocks": ("max_pinned_blocks", "Blocks that pinned sources may hold."),
}


@dataclass(frozen=True)
class _Metrics:
    gauges: Mapping[str, Gauge]
    ring_wraps: Counter
    refusals: Counter
    sessions: Gauge
    sessions_ended: Counter


@functools.cache
def _metrics() -> _Metrics:
    """Created on first use: a stock server shows none of them."""
    return _Metrics(
        gauges={
            figure: Gauge(f"bounded_kv_{name}", text, ["engine"], multiprocess_mode="mostrecent")
            for name, (figure, text) in GAUGES.items()
        },
        ring_wraps=Counter(
            "bounded_kv_ring_wraps", "Times a stream's ring has started over.", ["engine"]
        ),
        refusals=Counter("bounded_kv_refusals", "Requests refused.", ["reason"]),
        sessions=Gauge(
            "bounded_kv_sessions", "Sessions that are open.", multiprocess_mode="livesum"
        ),
        sessions_ended=Counter(
            "bounded_kv_sessions_ended", "Sessions ended for a limit.", ["reason"]
        ),
    )


REASONS = frozenset({"kv_source_len", "kv_sink", "kv_window", "kv_source"})
OTHER_REASON = "unknown_argument"
END_REASONS = ("idle", "cap")


def create(engines: Iterable[int]) -> None:
    """Make the metrics exist, every series at zero.

    Args:
        engines: the replicas' numbers.
    """
    for engine in engines:
        for gauge in _metrics().gauges.values():
            gauge.labels(engine)
        _metrics().ring_wraps.labels(engine)
    for reason in (*REASONS, OTHER_REASON):
        _metrics().refusals.labels(reason)
    for reason in END_REASONS:
        _metrics().sessions_ended.labels(reason)
    set_sessions(0)


def update(engine: int, figures: Mapping[str, Any]) -> None:
    """Take over one engine's figures, read with `mark_read`."""
    metrics = _metrics()
    for figure, gauge in metrics.gauges.items():
        gauge.labels(engine).set(figures[figure])
    metrics.ring_wraps.labels(engine).inc(figures["ring_wraps_unread"])


def count_refusal(reason: str) -> None:
    """Count a refused request by the argument at fault; unknown ones share a label."""
    _metrics().refusals.labels(reason if reason in REASONS else OTHER_REASON).inc()


def set_sessions(number: int) -> None:
    """Show how many sessions are open in this front end."""
    _metrics().sessions.set(number)


def count_session_end(reason: str) -> None:
    """Count a session that a limit has ended: `idle` or `cap`."""
    _metrics().sessions_ended.labels(reason).inc()
