"""Places among those that sound, and what is shown of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bounded_kv_server.errors import SpeechError
from bounded_kv_server.gate import Gate
from bounded_kv_server.metrics import metrics

SERVER = """
import asyncio, sys
from bounded_kv_server.gate import Gate

async def hold():
    gate = Gate(2, 2)
    async with gate.place(), gate.place():
        waits = asyncio.create_task(gate.place().__aenter__())
        await asyncio.sleep(0)
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        waits.cancel()

asyncio.run(hold())
"""


def shown() -> tuple[float, float]:
    return metrics().active._value.get(), metrics().waiting._value.get()


def test_places_are_counted_and_given_back() -> None:
    async def test() -> None:
        before, gate = shown(), Gate(1, 1)
        async with gate.place():
            waits = asyncio.create_task(gate.place().__aenter__())
            await asyncio.sleep(0)
            assert shown() == (before[0] + 1, before[1] + 1)
            with pytest.raises(SpeechError, match="--max-audio-queue 1"):
                async with gate.place():
                    pass
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            assert shown() == (before[0] + 1, before[1])
        assert shown() == before
        assert (gate.num_active, gate.num_waiting) == (0, 0)
        async with gate.place():
            pass

    asyncio.run(test())


def test_several_servers_are_shown_together(tmp_path: Path) -> None:
    """As with several API servers: each writes its metrics into a folder that all share."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    path = os.pathsep.join(part for part in sys.path if part)
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-c", SERVER]
    pipe = subprocess.PIPE
    servers = [subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe) for _ in range(2)]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == b"held\n"
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(tmp_path))
        assert registry.get_sample_value("bounded_kv_speech_active_streams") == 4
        assert registry.get_sample_value("bounded_kv_speech_waiting") == 2
    finally:
        for server in servers:
            server.communicate(b"")
