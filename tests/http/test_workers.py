"""Two replicas behind one address (`--data-parallel-size 2`), each with a pool of its own, and two
API servers, which vLLM starts for two replicas.

vLLM sends a request to the replica that has least to do, or to the one that a header names: that is
how each of them is looked at here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.tiny_llama import random_prompt
from support.engine import Ask, expect_exact
from support.nginx import NGINX, Nginx
from support.oracle_llama import OracleLlama
from support.server import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    START_UP_LINE,
    Metrics,
    complete,
    complete_all,
    figures,
    metrics,
    running_stream,
    serving,
    tiny_server_flags,
    wait_until,
    wait_until_idle,
)
from vllm_bounded_kv.launch import VllmServer, free_port

SINK, WINDOW, MAX_SOURCE, SLOTS, LIMIT, MAX_PINNED = 5, 96, 96, 2, 250, 4
SLOT_BLOCKS = -(-(MAX_SOURCE + WINDOW) // BLOCK_SIZE)
POOL_BLOCKS = SLOTS * SLOT_BLOCKS + MAX_PINNED
LONG = 420
"""Tokens of an answer in which positions fall back more than once."""
REPLICAS = (0, 1)
SOURCES = "/v1/bounded_kv/sources"
SOURCE_LEN = 70
SOURCE_BLOCKS = SOURCE_LEN // BLOCK_SIZE
TIMEOUT_S = 60.0
ENV = {
    # Otherwise vLLM wants a NUMA node for each worker, and binds its threads there.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Brings vLLM's /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
}


@pytest.fixture(scope="module")
def two_replicas(tiny_model: Path) -> Iterator[VllmServer]:
    flags = [
        *tiny_server_flags(POOL_BLOCKS),
        *("--data-parallel-size", "2", "--kv-plugin", "bounded", "--max-model-len", "20000"),
        *("--bounded-kv-sink", str(SINK), "--bounded-kv-window", str(WINDOW)),
        *("--bounded-kv-max-source-len", str(MAX_SOURCE), "--bounded-kv-max-slots", str(SLOTS)),
        *("--bounded-kv-max-pinned-blocks", str(MAX_PINNED)),
        *("--bounded-kv-position-limit", str(LIMIT)),
        *("--max-num-seqs", "8", "--enable-prompt-tokens-details"),
    ]
    with serving(tiny_model, flags, ENV) as server:
        yield server


@pytest.fixture
def server(two_replicas: VllmServer) -> Iterator[VllmServer]:
    """It, with no source afterwards and every block back, on both."""
    yield two_replicas
    for source in listed(two_replicas.url)["data"]:
        assert delete(two_replicas.url, source["name"]).status_code == 200
    shown = wait_until_idle(two_replicas.url)
    for replica in shown["replicas"]:
        assert replica["sources"] == replica["pinned_blocks"] == 0
        assert replica["pool_blocks_free"] == POOL_BLOCKS


@pytest.fixture
def url(server: VllmServer) -> str:
    return server.url


def to(replica: int) -> dict[str, str]:
    """The header by which vLLM sends a request to that replica."""
    return {"X-data-parallel-rank": str(replica)}


def post(url: str, name: str, tokens: list[int], **body: Any) -> httpx.Response:
    body = {"name": name, "prompt_token_ids": tokens, **body}
    return httpx.post(url + SOURCES, json=body, timeout=TIMEOUT_S)


def listed(url: str) -> dict[str, Any]:
    shown: dict[str, Any] = httpx.get(url + SOURCES, timeout=TIMEOUT_S).raise_for_status().json()
    return shown


def delete(url: str, name: str) -> httpx.Response:
    return httpx.delete(f"{url}{SOURCES}/{name}", timeout=TIMEOUT_S)


def source_of(seed: int) -> list[int]:
    return random_prompt(SOURCE_LEN, seed=1000 + seed)


def used(shown: dict[str, Any]) -> list[int]:
    """Slots used on each replica."""
    return [replica["slots_used"] for replica in shown["replicas"]]


def by_engine(scraped: Metrics, name: str) -> dict[str, float]:
    """A metric's value for each `engine` label."""
    values = [(labels["engine"], value) for n, labels, value in scraped.samples if n == name]
    assert len(values) == len(dict(values)), f"{name}: a label twice in {values}"
    return dict(values)


def test_each_says_what_it_has_at_start_up(server: VllmServer) -> None:
    lines = [line for line in server.log.splitlines() if START_UP_LINE.search(line)]
    assert len(lines) == len(REPLICAS)
    assert {re.search(r"EngineCore_DP(\d)", line)[1] for line in lines} == {"0", "1"}  # type: ignore[index]
    for line in lines:
        assert f"{SLOTS} slots in a pool of {POOL_BLOCKS} blocks" in line


def test_what_they_have_adds_up(url: str) -> None:
    shown = figures(url)
    assert [replica["engine"] for replica in shown["replicas"]] == list(REPLICAS)
    for replica in shown["replicas"]:
        assert (replica["slots_total"], replica["pool_blocks"]) == (SLOTS, POOL_BLOCKS)
        assert replica["max_pinned_blocks"] == MAX_PINNED
        assert "ring_wraps_unread" not in replica
    assert (shown["slots_total"], shown["pool_blocks"]) == (2 * SLOTS, 2 * POOL_BLOCKS)
    assert (shown["block_bytes"], shown["slot_blocks"]) == (BLOCK_BYTES, SLOT_BLOCKS)


def test_exact_on_both(url: str, oracle: OracleLlama) -> None:
    """Longer than the slot, past several falls of the positions, more streams than slots."""
    asks = [Ask(random_prompt(40 + 60 * i, seed=i), LONG) for i in range(5)]
    before = [replica["ring_wraps"] for replica in figures(url)["replicas"]]
    for ask, answer in zip(asks, complete_all(url, asks), strict=True):
        expect_exact(oracle, ask, answer, SINK, WINDOW, limit=LIMIT)
    shown = wait_until_idle(url)
    wraps = [
        replica["ring_wraps"] - b for replica, b in zip(shown["replicas"], before, strict=True)
    ]
    assert sum(wraps) == sum(
        (len(ask.prompt) + ask.max_tokens - 2 - SINK) // WINDOW for ask in asks
    )
    assert min(wraps) > 0, "one replica has done everything"
    counted = by_engine(metrics(url), "bounded_kv_ring_wraps_total")
    assert counted == {str(r["engine"]): r["ring_wraps"] for r in shown["replicas"]}


@pytest.mark.parametrize("replica", REPLICAS)
def test_a_stream_is_seen_where_it_is(url: str, replica: int) -> None:
    ask = Ask(random_prompt(20, seed=replica), 15_000)
    with running_stream(url, ask, headers=to(replica)):
        shown = wait_until(lambda: figures(url), lambda f: f["slots_used"] == 1)
        scraped = metrics(url)
    own, other = shown["replicas"][replica], shown["replicas"][1 - replica]
    assert len(own["streams"]) == 1 and other["streams"] == []
    assert [s["request_id"] for s in shown["streams"]] == [own["streams"][0]["request_id"]]
    held = own["pool_blocks"] - own["pool_blocks_free"]
    assert held == own["streams"][0]["blocks"] == -(-(SINK + WINDOW) // BLOCK_SIZE)
    assert other["pool_blocks_free"] == POOL_BLOCKS
    for name, values in {
        "bounded_kv_slots": (SLOTS, SLOTS),
        "bounded_kv_slots_used": (1, 0),
        "bounded_kv_pool_blocks": (POOL_BLOCKS, POOL_BLOCKS),
        "bounded_kv_pool_blocks_free": (POOL_BLOCKS - held, POOL_BLOCKS),
    }.items():
        assert by_engine(scraped, name) == {str(replica): values[0], str(1 - replica): values[1]}


def test_slots_of_both_are_used(url: str) -> None:
    """A full replica makes requests wait at its own door; the other one's slots are its own."""
    with ExitStack() as streams:
        for replica in REPLICAS:
            for seed in range(SLOTS):
                ask = Ask(random_prompt(10, seed=seed), 15_000)
                streams.enter_context(running_stream(url, ask, headers=to(replica)))
        assert used(figures(url)) == [SLOTS, SLOTS]
        assert by_engine(metrics(url), "bounded_kv_slots_used") == {"0": SLOTS, "1": SLOTS}
    wait_until_idle(url)


def test_a_source_is_pinned_on_both(url: str, oracle: OracleLlama) -> None:
    created = post(url, "voice", source_of(0))
    assert created.status_code == 201, created.text
    assert created.json()["is_computed"] is True
    assert created.json()["blocks"] == SOURCE_BLOCKS
    answer = listed(url)
    assert [(s["name"], s["is_computed"]) for s in answer["data"]] == [("voice", True)]
    assert (answer["pinned_blocks"], answer["max_pinned_blocks"]) == (SOURCE_BLOCKS, MAX_PINNED)
    shown = figures(url)
    assert shown["sources"] == 1
    assert [r["pinned_blocks"] for r in shown["replicas"]] == [SOURCE_BLOCKS] * 2
    assert by_engine(metrics(url), "bounded_kv_pinned_blocks") == {"0": 2, "1": 2}
    prompt = random_prompt(9, seed=2)
    for replica in REPLICAS:
        named = Ask(prompt, LONG, {"kv_source": "voice"})
        answer = complete(url, named, prompt_tokens=SOURCE_LEN + 9, headers=to(replica))
        assert answer.num_cached == SOURCE_BLOCKS * BLOCK_SIZE
        whole = Ask([*source_of(0), *prompt], LONG)
        expect_exact(oracle, whole, answer, SOURCE_LEN, WINDOW, limit=LIMIT)
    again = post(url, "voice", source_of(0), ttl_s=600)
    assert again.status_code == 200
    assert delete(url, "voice").json()["deleted"] is True
    assert [r["pinned_blocks"] for r in figures(url)["replicas"]] == [0, 0]
    assert delete(url, "voice").status_code == 404


def test_the_quota_is_each_ones_own(url: str) -> None:
    """And a source that is refused is on neither."""
    for seed in range(MAX_PINNED // SOURCE_BLOCKS):
        assert post(url, f"voice-{seed}", source_of(seed)).status_code == 201
    refused = post(url, "one-more", source_of(9))
    assert refused.status_code == 409 and "4 of 4 are pinned" in refused.text
    assert [r["pinned_blocks"] for r in figures(url)["replicas"]] == [MAX_PINNED] * 2
    assert len(listed(url)["data"]) == 2


def test_a_refused_request_is_refused_before_a_replica_is_chosen(url: str) -> None:
    before = metrics(url).refusals()["kv_window"]
    with pytest.raises(openai.BadRequestError, match="kv_window=97"):
        complete(url, Ask([65], 3, {"kv_window": WINDOW + 1}))
    assert metrics(url).refusals()["kv_window"] == before + 1


def test_a_reset_of_the_prefix_cache_reaches_both(url: str) -> None:
    assert post(url, "voice", source_of(3)).status_code == 201
    wait_until_idle(url)
    assert httpx.post(f"{url}/reset_prefix_cache", timeout=TIMEOUT_S).status_code == 200
    for replica in REPLICAS:
        named = Ask([65], 3, {"kv_source": "voice"})
        answer = complete(url, named, prompt_tokens=SOURCE_LEN + 1, headers=to(replica))
        assert answer.num_cached == SOURCE_BLOCKS * BLOCK_SIZE


# --- session affinity, with nginx in front

AFFINITY = Path(__file__).parents[2] / "examples" / "affinity" / "nginx.conf"
ONE_REPLICA = """\
server {{
    listen 127.0.0.1:{port};
    location / {{
        proxy_pass {url};
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header X-data-parallel-rank {replica};
        proxy_buffering off;
        add_header X-Replica {replica};
    }}
}}
"""


@dataclass
class Affinity:
    """The documented nginx, and the two that it speaks to: each is one replica of the server's."""

    url: str
    replicas: list[Nginx]

    def where(self, headers: dict[str, str]) -> int:
        """The replica that requests with those headers go to."""
        response = httpx.get(f"{self.url}/health", headers=headers, timeout=TIMEOUT_S)
        return int(response.raise_for_status().headers["X-Replica"])


@pytest.fixture
def affinity(url: str, tmp_path: Path) -> Iterator[Affinity]:
    front, *ports = (free_port() for _ in range(3))
    conf = AFFINITY.read_text().replace("listen 8000", f"listen 127.0.0.1:{front}")
    with ExitStack() as stack:
        replicas = []
        for replica, port in enumerate(ports):
            conf = conf.replace(f"127.0.0.1:800{replica + 1}", f"127.0.0.1:{port}")
            http = ONE_REPLICA.format(port=port, url=url, replica=replica)
            one = Nginx(tmp_path / str(replica), http, f"http://127.0.0.1:{port}/health")
            stack.callback(one.stop)
            replicas.append(one)
        address = f"http://127.0.0.1:{front}"
        stack.callback(Nginx(tmp_path / "front", conf, f"{address}/health").stop)
        yield Affinity(address, replicas)


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)")
def test_a_session_stays_where_its_source_is(url: str, affinity: Affinity) -> None:
    """Sessions are spread; each finds its source again; those of a dead replica move."""
    sessions = [{"X-Session-ID": f"session-{i}"} for i in range(40)]
    places = [affinity.where(headers) for headers in sessions]
    assert places == [affinity.where(headers) for headers in sessions]
    assert min(places.count(replica) for replica in REPLICAS) >= 8
    sources = [{"X-KV-Source": f"voice-{i}"} for i in range(40)]
    named = [affinity.where(headers) for headers in sources]
    assert named == [affinity.where({**headers, "X-Session-ID": ""}) for headers in sources]
    assert set(named) == set(REPLICAS)

    def hits(address: str, replica: int, headers: dict[str, str]) -> int:
        prompt = [*random_prompt(SOURCE_LEN, seed=2000 + replica), 65]
        ask = Ask(prompt, 3, {"kv_source_len": SOURCE_LEN})
        return complete(address, ask, headers=headers).num_cached

    everything = SOURCE_BLOCKS * BLOCK_SIZE
    of = [sessions[places.index(replica)] for replica in REPLICAS]
    for replica in REPLICAS:
        assert hits(affinity.url, replica, of[replica]) == 0
        assert hits(affinity.url, replica, of[replica]) == everything
        assert hits(url, replica, to(replica)) == everything
    affinity.replicas[1].stop()
    assert hits(affinity.url, 0, of[0]) == everything
    assert hits(affinity.url, 1, of[1]) == 0, "the one that is left had never read it"
    assert hits(affinity.url, 1, of[1]) == everything
    assert {affinity.where(headers) for headers in sessions} == {0}
