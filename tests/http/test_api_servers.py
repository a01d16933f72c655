"""Two API servers in front of one engine, started from one `--config` file with every flag in it.

Each request goes to one of the two. Whichever answers shows the same figures, and counters, which
Prometheus adds up over the processes, count nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.tiny_llama import random_prompt
from support.engine import Ask, expect_exact
from support.oracle_llama import OracleLlama
from support.server import (
    ENDLESS,
    MAX_POSITIONS,
    SERVED,
    complete,
    complete_all,
    figures,
    is_idle,
    metrics,
    openai_client,
    parse_metrics,
    processes,
    running_stream,
    serving,
    start_up_line,
    tiny_server_flags,
    wait_until,
    wait_until_idle,
)
from vllm_bounded_kv.launch import VllmServer

SINK, WINDOW, SLOTS, POOL_BLOCKS, LIMIT = 3, 61, 2, 9, 100
NUM_CONNECTIONS = 10
MAX_CONNECTIONS = 200
"""The kernel picks the API server of each connection, and need not be fair."""

CONFIG = f"""\
kv-plugin: bounded
bounded-kv-sink: {SINK}
bounded-kv-window: {WINDOW}
bounded-kv-max-slots: {SLOTS}
bounded-kv-positions: rebase
bounded-kv-position-limit: {LIMIT}
max-num-seqs: 8
api-server-count: 2
"""


LONG = ("--max-model-len", str(MAX_POSITIONS))


def as_yaml(flags: list[str]) -> str:
    """Flags in the form of vLLM's `--config` file."""
    lines = []
    for flag, following in zip(flags, [*flags[1:], "--"], strict=True):
        if flag.startswith("--"):
            lines.append(f"{flag[2:]}: {'true' if following.startswith('--') else following}\n")
    return "".join(lines)


@pytest.fixture(scope="module")
def two_api_servers(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    file = tmp_path_factory.mktemp("config") / "server.yaml"
    file.write_text(CONFIG + as_yaml([*tiny_server_flags(POOL_BLOCKS), *LONG]))
    # A connection is looked at after its answer, which takes more than the 5 s that vLLM keeps it
    # open where all cores are busy.
    env = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
    with serving(tiny_model, ["--config", str(file)], env) as server:
        yield server


@pytest.fixture
def server(two_api_servers: VllmServer) -> Iterator[VllmServer]:
    """It, with every block back afterwards."""
    yield two_api_servers
    wait_until_idle(two_api_servers.url)


@pytest.fixture
def url(server: VllmServer) -> str:
    return server.url


def api_server_of(server: VllmServer, response: httpx.Response) -> int:
    """The process that holds the other end of the response's connection, which is still open."""
    client_port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
    (pid,) = {
        process.pid
        for process in processes(server, "ApiServer", "APIServer", "serve")
        for connection in process.net_connections("tcp")
        if connection.raddr and connection.raddr.port == client_port
    }
    return pid


def from_both(server: VllmServer, path: str) -> list[httpx.Response]:
    """Answers over fresh connections, at least two from each API server."""
    answers: list[httpx.Response] = []
    count: Counter[int] = Counter()
    while len(answers) < NUM_CONNECTIONS or len(count) < 2 or min(count.values()) < 2:
        assert len(answers) < MAX_CONNECTIONS, f"answers by process: {count}"
        with httpx.Client(timeout=60) as client:
            answers.append(client.get(server.url + path).raise_for_status())
            count[api_server_of(server, answers[-1])] += 1
    return answers


def test_the_config_file_has_been_read(server: VllmServer) -> None:
    shown, line = figures(server.url), start_up_line(server)
    policy = shown["policy"]
    assert (policy["sink"], policy["window"], policy["max_slots"]) == (SINK, WINDOW, SLOTS)
    assert (policy["positions"], policy["position_limit"]) == ("rebase", LIMIT)
    assert (shown["slots_total"], shown["pool_blocks"]) == (SLOTS, POOL_BLOCKS)
    assert (line["slots_total"], line["pool_blocks"]) == (SLOTS, POOL_BLOCKS)


def test_figures_are_the_same_from_both(server: VllmServer) -> None:
    ask = Ask(random_prompt(20), ENDLESS)
    with running_stream(server.url, ask):
        shown = [answer.json() for answer in from_both(server, "/v1/bounded_kv")]
    fixed = [{k: v for k, v in f.items() if k not in ("streams", "ring_wraps")} for f in shown]
    assert all(f == fixed[0] for f in fixed)
    assert fixed[0]["slots_used"] == 1
    streams = [f["streams"][0] for f in shown]
    assert len({stream["request_id"] for stream in streams}) == 1
    positions = [stream["position"] for stream in streams]
    assert positions == sorted(positions)


def test_metrics_are_the_same_from_both(server: VllmServer) -> None:
    """While a stream runs, and once it has gone: no gauge is left over in the other process."""
    for is_running in (True, False):
        if is_running:
            with running_stream(server.url, Ask(random_prompt(20), ENDLESS)):
                answers = from_both(server, "/metrics")
        else:
            wait_until_idle(server.url)
            answers = from_both(server, "/metrics")
        for scraped in (parse_metrics(answer.text) for answer in answers):
            assert scraped("bounded_kv_slots") == SLOTS
            assert scraped("bounded_kv_slots_used") == is_running
            assert scraped("bounded_kv_pool_blocks_free") == POOL_BLOCKS - 2 * is_running
            assert scraped("bounded_kv_pool_blocks") == POOL_BLOCKS


def test_wraps_are_not_counted_twice(server: VllmServer) -> None:
    """However often, and by whom, they were scraped meanwhile."""
    before = figures(server.url)["ring_wraps"]
    for seed in range(3):
        complete(server.url, Ask(random_prompt(20, seed=seed), 3 * WINDOW))
        from_both(server, "/metrics")
    shown = wait_until_idle(server.url)
    entries = 20 + 3 * WINDOW - 1
    assert shown["ring_wraps"] - before == 3 * ((entries - 1 - SINK) // WINDOW)
    totals = {
        parse_metrics(answer.text)("bounded_kv_ring_wraps_total")
        for answer in from_both(server, "/metrics")
    }
    assert totals == {shown["ring_wraps"]}


def refuse(server: VllmServer, args: dict[str, Any]) -> int:
    """A refused request over a fresh connection; which API server refused it."""
    body = {"model": SERVED, "prompt": [65] * 5, "vllm_xargs": args}
    with httpx.Client(timeout=60) as client:
        response = client.post(f"{server.url}/v1/completions", json=body)
        assert response.status_code == 400
        return api_server_of(server, response)


def test_refusals_of_both_add_up(server: VllmServer) -> None:
    before = metrics(server.url).refusals()
    count: Counter[int] = Counter()
    while len(count) < 2 or min(count.values()) < 2:
        assert count.total() < MAX_CONNECTIONS, f"refusals by process: {count}"
        count[refuse(server, {"kv_window": WINDOW + 1})] += 1
    refuse(server, {"kv_else": 1})
    expected = {
        **before,
        "kv_window": before["kv_window"] + count.total(),
        "unknown_argument": before["unknown_argument"] + 1,
    }
    for answer in from_both(server, "/metrics"):
        assert parse_metrics(answer.text).refusals() == expected


def test_streams_of_both_share_the_slots(url: str, oracle: OracleLlama) -> None:
    asks = [Ask(random_prompt(20 + i, seed=i), 2 * WINDOW) for i in range(8)]
    for ask, answer in zip(asks, complete_all(url, asks), strict=True):
        expect_exact(oracle, ask, answer, SINK, WINDOW, limit=LIMIT)


def test_a_refusal_does_not_stream_in_either(url: str) -> None:
    for _ in range(NUM_CONNECTIONS):
        with pytest.raises(openai.BadRequestError, match="kv_sink=99"):
            openai_client(url).completions.create(
                model=SERVED,
                prompt=[65],
                stream=True,
                extra_body={"vllm_xargs": {"kv_sink": 99}},
            )


def test_leaving_a_stream_frees_its_slot_in_either(url: str) -> None:
    for seed in range(6):
        with running_stream(url, Ask(random_prompt(20, seed=seed), ENDLESS)):
            wait_until(lambda: figures(url), lambda f: f["slots_used"] == 1)
        wait_until(lambda: figures(url), is_idle)
