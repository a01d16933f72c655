"""The start-up line, `GET /v1/bounded_kv`, `/metrics` and the arithmetic: one truth."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from benchmarks.tiny_llama import TinyLlama, random_prompt
from support.engine import Ask
from support.server import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    ENDLESS,
    Metrics,
    complete,
    figures,
    metrics,
    running_stream,
    start_up_line,
    wait_until,
    wait_until_idle,
)
from vllm_bounded_kv.launch import VllmServer

SINK, WINDOW, MAX_SOURCE, SLOTS = 5, 96, 96, 4
CAPACITY = SINK + WINDOW
STREAM_BLOCKS = 4  # of a stream that asks for nothing
LARGEST_BLOCKS = 6
POOL_BLOCKS = 39
SOURCE_BLOCKS = MAX_SOURCE // BLOCK_SIZE

GAUGES = {
    "bounded_kv_slots": "slots_total",
    "bounded_kv_slots_used": "slots_used",
    "bounded_kv_slot_bytes": "slot_bytes",
    "bounded_kv_pool_blocks": "pool_blocks",
    "bounded_kv_pool_blocks_free": "pool_blocks_free",
    "bounded_kv_source_blocks_held": "source_blocks_held",
    "bounded_kv_source_blocks_shared": "source_blocks_shared",
    "bounded_kv_sources": "sources",
    "bounded_kv_pinned_blocks": "pinned_blocks",
    "bounded_kv_max_pinned_blocks": "max_pinned_blocks",
    "bounded_kv_ring_wraps_total": "ring_wraps",
}


def as_json(scraped: Metrics) -> dict[str, float]:
    return {field: scraped(name) for name, field in GAUGES.items()}


def test_the_arithmetic(url: str) -> None:
    tiny = TinyLlama()
    entry_bytes = tiny.num_layers * 2 * tiny.num_kv_heads * tiny.head_dim * 4
    shown = figures(url)
    blocks = -(-(MAX_SOURCE + WINDOW) // shown["block_size"])
    assert shown["slot_blocks"] == blocks == LARGEST_BLOCKS
    assert shown["block_bytes"] == entry_bytes * shown["block_size"] == BLOCK_BYTES
    assert shown["slot_bytes"] == entry_bytes * shown["block_size"] * blocks
    assert shown["pool_blocks"] == POOL_BLOCKS
    assert shown["slots_total"] == SLOTS <= shown["pool_blocks"] // blocks
    assert shown["max_pinned_blocks"] == POOL_BLOCKS - SLOTS * blocks


def test_the_policy(url: str) -> None:
    assert figures(url)["policy"] == {
        "sink": SINK,
        "window": WINDOW,
        "max_source_len": MAX_SOURCE,
        "max_slots": SLOTS,
        "max_pinned_blocks": None,
        "session_idle_s": None,
        "max_sessions": None,
        "positions": "absolute",
        "position_limit": None,
        "window_includes_step": True,
        "retention": None,
        "num_draft_tokens": 0,
    }


def test_the_start_up_line(server: VllmServer) -> None:
    line, shown = start_up_line(server), figures(server.url)
    assert line.pop("source_blocks") == SOURCE_BLOCKS
    assert (line.pop("sink"), line.pop("window")) == (MAX_SOURCE, WINDOW)
    assert line == {name: shown[name] for name in line}


def test_metrics_agree_while_nothing_runs(url: str) -> None:
    shown = wait_until_idle(url)
    scraped = metrics(url)
    assert as_json(scraped) == {field: shown[field] for field in GAUGES.values()}
    assert scraped.names("bounded_kv_") == {
        *GAUGES,
        "bounded_kv_ring_wraps_created",
        "bounded_kv_refusals_total",
        "bounded_kv_refusals_created",
        "bounded_kv_sessions",
        "bounded_kv_sessions_ended_total",
        "bounded_kv_sessions_ended_created",
    }


def test_vllms_own_metrics_are_still_there_and_move(url: str) -> None:
    before = metrics(url)
    complete(url, Ask(random_prompt(30), max_tokens=50))
    after = metrics(url)
    for name, moved in {
        "vllm:prompt_tokens_total": 30,
        "vllm:generation_tokens_total": 50,
        "vllm:request_success_total": 1,
        "vllm:time_to_first_token_seconds_count": 1,
    }.items():
        assert after(name) - before(name) == moved, name
    assert after("vllm:kv_cache_usage_perc") == 0
    assert after("vllm:num_requests_running") == 0
    assert after.names("process_") and after.names("http_requests_total")


def test_metrics_are_prometheus_text(url: str) -> None:
    response = httpx.get(f"{url}/metrics", headers={"Accept-Encoding": "gzip"}, timeout=60)
    assert response.headers["content-type"].startswith("text/plain; version=")
    for name in ("bounded_kv_slots", "bounded_kv_ring_wraps_total"):
        assert response.text.count(f"# HELP {name} ") == 1


def test_a_stream_as_it_goes_on(url: str) -> None:
    """Its position climbs, what it holds does not; every entry is retained or evicted."""
    ask = Ask(random_prompt(50, seed=4), ENDLESS)
    wraps = figures(url)["ring_wraps"]
    readings: list[dict[str, Any]] = []
    scrapes: list[Metrics] = []
    # How many readings there are before it has gone round is for the machine to say.
    with running_stream(url, ask):
        while len(readings) < 10 or readings[-1]["streams"][0]["position"] <= 2 * CAPACITY:
            readings.append(figures(url))
            if len(readings) % 3 == 1:
                scrapes.append(metrics(url))
    streams = [shown["streams"][0] for shown in readings]
    positions = [stream["position"] for stream in streams]
    assert positions == sorted(positions) and positions[0] < positions[-1]
    assert len({stream["request_id"] for stream in streams}) == 1
    for shown, stream in zip(readings, streams, strict=True):
        assert shown["slots_used"] == len(shown["streams"]) == 1
        assert stream["blocks"] == STREAM_BLOCKS
        assert shown["pool_blocks"] - shown["pool_blocks_free"] == STREAM_BLOCKS
        assert stream["retained"] == min(stream["position"], CAPACITY)
        assert stream["retained"] + stream["evicted"] == stream["position"]
        assert (stream["sink"], stream["window"]) == (SINK, WINDOW)
        assert shown["ring_wraps"] - wraps == (stream["position"] - 1 - SINK) // WINDOW
        assert shown["source_blocks_held"] == 0  # no block fits inside the sink
    assert {s("bounded_kv_slots_used") for s in scrapes} == {1}
    assert {s("bounded_kv_pool_blocks_free") for s in scrapes} == {POOL_BLOCKS - STREAM_BLOCKS}
    counted = [s("bounded_kv_ring_wraps_total") for s in scrapes]
    assert counted == sorted(counted)


def test_the_times_that_a_stream_went_round_are_all_counted(url: str) -> None:
    prompt_len, max_tokens = 50, 60 * WINDOW
    wraps = wait_until_idle(url)["ring_wraps"]
    complete(url, Ask(random_prompt(prompt_len, seed=4), max_tokens))
    # The last token is never an entry: nothing comes after it.
    entries = prompt_len + max_tokens - 1
    shown = wait_until_idle(url)
    assert shown["ring_wraps"] - wraps == (entries - 1 - SINK) // WINDOW
    assert metrics(url)("bounded_kv_ring_wraps_total") == shown["ring_wraps"]


@pytest.mark.parametrize(
    ("sink", "window"), [(0, 1), (0, 32), (0, 33), (SINK, WINDOW), (31, 33), (96, 96)]
)
def test_a_stream_holds_what_its_own_policy_needs(url: str, sink: int, window: int) -> None:
    ask = Ask(random_prompt(20), ENDLESS, {"kv_sink": sink, "kv_window": window})
    with running_stream(url, ask):
        shown = figures(url)
        (stream,) = shown["streams"]
    assert (stream["sink"], stream["window"]) == (sink, window)
    assert stream["blocks"] == -(-(sink + window) // BLOCK_SIZE)
    assert shown["pool_blocks"] - shown["pool_blocks_free"] == stream["blocks"]


def test_source_blocks_of_two_streams(url: str) -> None:
    """Held once and shared while both run, held alone when one has gone."""
    source = random_prompt(MAX_SOURCE, seed=99)
    ask = Ask([*source, 65, 66, 67], ENDLESS, {"kv_source_len": MAX_SOURCE})
    other = Ask([*source, 75, 76], ENDLESS, {"kv_source_len": MAX_SOURCE})

    def expect(streams: int, shared: int) -> None:
        shown = wait_until(lambda: figures(url), lambda f: f["slots_used"] == streams)
        held = SOURCE_BLOCKS + streams * (LARGEST_BLOCKS - SOURCE_BLOCKS)
        assert shown["source_blocks_held"] == SOURCE_BLOCKS
        assert shown["source_blocks_shared"] == shared
        assert shown["pool_blocks"] - shown["pool_blocks_free"] == held
        assert {s["blocks"] for s in shown["streams"]} == {LARGEST_BLOCKS}
        scraped = metrics(url)
        assert scraped("bounded_kv_source_blocks_held") == SOURCE_BLOCKS
        assert scraped("bounded_kv_source_blocks_shared") == shared

    with ExitStack() as first, ExitStack() as second:
        first.enter_context(running_stream(url, ask))
        expect(streams=1, shared=0)
        second.enter_context(running_stream(url, other))
        expect(streams=2, shared=SOURCE_BLOCKS)
        first.close()
        expect(streams=1, shared=0)
    wait_until_idle(url)
    assert metrics(url)("bounded_kv_source_blocks_held") == 0


def test_a_shared_source_is_not_computed_again(url: str) -> None:
    source = random_prompt(MAX_SOURCE, seed=98)
    args = {"kv_source_len": MAX_SOURCE}
    cached = [complete(url, Ask([*source, i], 5, args)).num_cached for i in (65, 66, 67)]
    assert cached == [0, MAX_SOURCE, MAX_SOURCE]
