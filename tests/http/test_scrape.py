"""Prometheus itself, with docker/'s configuration, scrapes a running server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.tiny_llama import random_prompt
from support.engine import Ask
from support.prometheus import DOCKER, alerts, as_asked, metric_names, panels, program
from support.server import complete_all, metrics, wait_until
from vllm_bounded_kv.launch import VllmServer, free_port

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def prometheus(
    shared_server: VllmServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Its address. It scrapes every second."""
    command, folder = program("prometheus"), tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config["global"]["evaluation_interval"] = "1s"
    config["rule_files"] = [str(DOCKER / file) for file in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [shared_server.url.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    url = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                command,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={url}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: is_ready(f"http://{url}"), bool)
        yield f"http://{url}"
    finally:
        process.terminate()
        process.wait(30)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def get(url: str, path: str, **params: str) -> Any:
    response = httpx.get(f"{url}/api/v1/{path}", params=params, timeout=30).raise_for_status()
    return response.json()["data"]


def value(url: str, expression: str) -> float:
    """Of the only series that there is; below 0: of none."""
    found = get(url, "query", query=expression)["result"]
    assert len(found) <= 1
    return float(found[0]["value"][1]) if found else -1.0


def test_every_expression_about_text_has_a_value(
    shared_server: VllmServer, prometheus: str
) -> None:
    wait_until(lambda: value(prometheus, 'up{job="bounded-kv"}'), lambda up: up == 1)
    instance = shared_server.url.removeprefix("http://")
    asks = [Ask(random_prompt(30, seed=seed), max_tokens=400) for seed in range(2)]
    complete_all(shared_server.url, asks)
    wraps = "sum(rate(bounded_kv_ring_wraps_total[1m]))"
    wait_until(lambda: value(prometheus, wraps), lambda rate: rate > 0)
    asked = 0
    for panel in panels():
        for target in panel["targets"]:
            if any(name.startswith("bounded_kv_speech") for name in metric_names(target["expr"])):
                continue  # this server does not speak
            for within in (instance, ".*"):
                expression = as_asked(target["expr"], "1m", within)
                assert get(prometheus, "query", query=expression)["result"], expression
            nowhere = as_asked(target["expr"], "1m", "nobody")
            assert not get(prometheus, "query", query=nowhere)["result"], nowhere
            asked += 1
    assert asked > 20
    for quantile in ("vllm:inter_token_latency_seconds", "vllm:time_to_first_token_seconds"):
        assert (
            value(
                prometheus,
                f"histogram_quantile(0.5, sum by (le) (rate({quantile}_bucket[1m])))",
            )
            > 0
        )


def test_the_figures_are_the_servers(shared_server: VllmServer, prometheus: str) -> None:
    wait_until(lambda: value(prometheus, "sum(bounded_kv_slots)"), lambda v: v > 0)
    scraped = metrics(shared_server.url)
    for name in ("bounded_kv_slots", "bounded_kv_slot_bytes", "bounded_kv_pool_blocks"):
        assert value(prometheus, f"sum({name})") == scraped(name)


def test_the_alerts_are_loaded_and_none_fires(prometheus: str) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in get(prometheus, "rules")["groups"] for rule in group["rules"]]

    loaded = wait_until(rules, lambda found: all(rule["health"] == "ok" for rule in found))
    assert {rule["name"] for rule in loaded} == {rule["alert"] for rule in alerts()}
    assert {rule["state"] for rule in loaded} == {"inactive"}
