"""What a server holds: blocks, slots, sources, files, threads, memory; and that it comes back."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
import psutil

from benchmarks.server_processes import family
from support.server import parse_metrics, wait_until
from vllm_bounded_kv.launch import VllmServer

IDLE_THREADS = 8
"""asyncio's own executor starts them as they are needed, up to cores + 4, and keeps them."""
FILES = 4
"""Sockets that are about to be closed."""
RSS_BYTES = 64_000_000
"""In all processes, after a round that has warmed them up: allocators keep what they had."""
BACK_S = 120.0


@dataclass(frozen=True)
class Held:
    """At one moment."""

    slots: float
    blocks: float
    """That are not free."""
    pinned: float
    source_blocks: float
    sessions: float
    speech: float
    """Streams of speech that sound or wait."""
    threads: int
    files: int
    rss: int
    processes: int

    def is_back_at(self, before: Held, rss_bytes: int) -> bool:
        """Whether no more is held than `before`, but for what is said above."""
        same = ("slots", "blocks", "pinned", "source_blocks", "sessions", "speech", "processes")
        return (
            all(getattr(self, name) == getattr(before, name) for name in same)
            and self.threads <= before.threads + IDLE_THREADS
            and self.files <= before.files + FILES
            and self.rss <= before.rss + rss_bytes
        )


def held(server: VllmServer) -> Held:
    """What `server` holds now, by `/metrics` and by its processes."""
    assert server.process is not None
    text = httpx.get(f"{server.url}/metrics", timeout=60).raise_for_status().text
    shown = parse_metrics(text)
    names = shown.names("bounded_kv_")

    def value(name: str) -> float:
        return shown(name) if name in names else 0

    threads = files = rss = count = 0
    for process in family(server.process.pid):
        try:
            threads += process.num_threads()
            files += process.num_fds()
            rss += process.memory_info().rss
            count += 1
        except psutil.NoSuchProcess:
            pass
    return Held(
        slots=value("bounded_kv_slots_used"),
        blocks=value("bounded_kv_pool_blocks") - value("bounded_kv_pool_blocks_free"),
        pinned=value("bounded_kv_pinned_blocks"),
        source_blocks=value("bounded_kv_source_blocks_held"),
        sessions=value("bounded_kv_sessions"),
        speech=value("bounded_kv_speech_active_streams") + value("bounded_kv_speech_waiting"),
        threads=threads,
        files=files,
        rss=rss,
        processes=count,
    )


def wait_until_back(server: VllmServer, before: Held, rss_bytes: int = RSS_BYTES) -> Held:
    """What it holds once it is back where it was.

    Raises:
        AssertionError: with the last reading, when it never is.
    """
    return wait_until(lambda: held(server), lambda now: now.is_back_at(before, rss_bytes), BACK_S)
