"""docker/: what it names is there. The images themselves are built by hand (see its README)."""

from __future__ import annotations

import fnmatch
import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.prometheus import (
    DASHBOARD,
    DOCKER,
    alerts,
    dashboard,
    metric_names,
    panels,
    program,
    shown,
)

ROOT = DOCKER.parent
UNITS = {"bytes", "none", "ops", "percentunit", "reqps", "s", "short"}
"""Of Grafana's, those in use here."""
SCRAPES = {"up", "scrape_duration_seconds"}
"""Prometheus's own, of every target."""


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


# --- the Dockerfile


@dataclass(frozen=True)
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]]

    def arguments(self, instruction: str) -> list[str]:
        return [text for name, text in self.steps if name == instruction]


def stages() -> dict[str, Stage]:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            base, _, name = re.split(r"\s+", rest)
            found[name] = Stage(name, base, [])
        elif found:
            found[name].steps.append((instruction, rest))
    return found


def lineage(name: str) -> list[Stage]:
    """The stages that an image is made of, its own last."""
    known = stages()
    found: list[Stage] = []
    while name in known:
        found.insert(0, known[name])
        name = known[name].base
    return found


def last(target: str, instruction: str) -> str:
    return [text for stage in lineage(target) for text in stage.arguments(instruction)][-1]


TARGETS = ("cpu", "cuda")


def test_the_default_target_is_for_cpus() -> None:
    assert list(stages())[-1] == "cpu"


def test_every_base_is_pinned_by_its_tag() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, flags=re.M))
    known = stages()
    bases = {stage.base for stage in known.values()} - known.keys()
    images = {re.sub(r"^\$\{(\w+)\}$", lambda match: pins[match[1]], base) for base in bases}
    images |= {s["image"] for s in compose()["services"].values() if "build" not in s}
    assert len(images) == 3
    for image in images:
        assert re.fullmatch(r"[\w./-]+:v?\d+(\.\d+){1,2}[\w.-]*(@sha256:[0-9a-f]{64})?", image), (
            image
        )


@pytest.mark.parametrize("target", TARGETS)
def test_nobody_is_root(target: str) -> None:
    user, *_ = last(target, "USER").split(":")
    assert int(user) > 0
    made = " ".join(step for stage in lineage(target) for step in stage.arguments("RUN"))
    assert f"--uid {user} " in made
    for folder in json.loads(last(target, "VOLUME")):
        assert re.search(rf"install -d -o bounded .*{folder}\b", made)


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_installed_as_everywhere(target: str) -> None:
    """By scripts/setup, whose inputs are there, into the place that it is run from."""
    installed, _ = stages()[target].arguments("COPY")
    builder = re.match(r"--from=(\S+) (\S+)/\.venv \.venv$", installed)
    assert builder
    assert builder[2] == last(builder[1], "WORKDIR") == last(target, "WORKDIR")
    assert f"scripts/setup {target}" in last(builder[1], "RUN")
    copied = {
        path
        for stage in lineage(builder[1])
        for step in stage.arguments("COPY")
        for path in step.split()[:-1]
    }
    assert {"requirements", "packaging", "pyproject.toml", "scripts/setup"} <= copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {project["readme"], *project["license-files"]} <= copied


@pytest.mark.parametrize("target", TARGETS)
def test_the_packages_are_where_the_installation_looks(target: str) -> None:
    sources = stages()["sources"]
    assert stages()[target].arguments("COPY")[1] == f"--from=sources {last(target, 'WORKDIR')} ./"
    assert sources.arguments("WORKDIR") == [last(target, "WORKDIR")]
    copied = {tuple(step.split()) for step in sources.arguments("COPY")}
    assert {(n, n) for n in ("vllm_bounded_kv", "bounded_kv_speech", "server")} <= copied
    assert sources.steps[-1] == ("RUN", "chmod -R a+rX .")
    stubs = stages()["pinned"].arguments("RUN")[0]
    for package in ("vllm_bounded_kv", "bounded_kv_speech", "server/bounded_kv_server"):
        assert (ROOT / package / "__init__.py").exists()
        assert re.search(rf"[ ]{package}[ ;]", stubs)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    dropped = [rule for rule in rules[1:] if not rule.startswith("!")]
    copied = {
        path
        for stage in stages().values()
        for step in stage.arguments("COPY")
        if not step.startswith("--from=")
        for path in step.split()[:-1]
    }
    assert copied == allowed
    for path in copied:
        assert (ROOT / path).exists()
        assert not any(fnmatch.fnmatch(path, rule.removeprefix("**/")) for rule in dropped)


def test_no_compiler_on_cpus() -> None:
    run = " ".join(step for stage in lineage("cpu") for step in stage.arguments("RUN"))
    assert not re.search(r"\b(gcc|g\+\+|build-essential|clang|make|cmake|libc6-dev)\b", run)


@pytest.mark.parametrize("target", TARGETS)
def test_what_it_runs(target: str) -> None:
    entry = json.loads(last(target, "ENTRYPOINT"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert entry[0] in project["scripts"]
    options = dict(zip(entry[1::2], entry[2::2], strict=True))
    assert options["--host"] == "0.0.0.0"
    assert options["--port"] == last(target, "EXPOSE")
    environment = " ".join(s for stage in lineage(target) for s in stage.arguments("ENV"))
    home = re.search(r"HF_HOME=(\S+)", environment)
    assert home and {home[1], options["--voices-dir"]} == set(json.loads(last(target, "VOLUME")))


@pytest.mark.parametrize("target", TARGETS)
def test_the_entry_point_is_vllm_serve_with_the_plugin(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bounded_kv_server import cli

    became: list[list[str]] = []
    monkeypatch.setattr("os.execvp", lambda file, command: became.append(command))
    _, *options = json.loads(last(target, "ENTRYPOINT"))
    given = re.fullmatch(r"\$\{ARGS:-(.+)\}", compose()["services"][f"server-{target}"]["command"])
    assert given
    cli.main([*options, "--model", "some/model", *given[1].split()])
    (command,) = became
    assert command[:3] == ["vllm", "serve", "some/model"]
    assert " --kv-plugin bounded " in " ".join(command)
    assert " --host 0.0.0.0 --port 8000 --voices-dir /voices" in " ".join(command)


@pytest.fixture
def answering() -> Iterator[tuple[int, dict[str, int]]]:
    """A server's port, and the status by path that it answers with."""
    status: dict[str, int] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status.get(self.path, 404))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, status
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (404, 1), (None, 1)])
def test_the_health_check(
    answering: tuple[int, dict[str, int]], status: int | None, code: int
) -> None:
    port, by_path = answering
    by_path["/health"] = status or 200
    if status is None:
        port = 1  # nobody is there
    words = last("cpu", "HEALTHCHECK")
    assert re.search(r"--start-period=\d+m", words)
    python, *command = json.loads(words.split("CMD", 1)[1])
    assert python == "python" and " 8000," in command[-1]
    command[-1] = command[-1].replace(" 8000,", f" {port},")
    done = subprocess.run([sys.executable, *command], stderr=subprocess.DEVNULL, timeout=60)
    assert done.returncode == code


# --- compose, and what it mounts


def test_every_service_listens_on_this_host_only() -> None:
    for name, service in compose()["services"].items():
        assert service["ports"], name
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:${"), name


def test_one_server_for_each_target() -> None:
    services = compose()["services"]
    for target in TARGETS:
        service = services[f"server-{target}"]
        assert service["profiles"] == [target]
        assert service["build"]["target"] == target
        assert (DOCKER / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).exists()
        mounts = dict(volume.split(":") for volume in service["volumes"])
        assert set(mounts.values()) == set(json.loads(last(target, "VOLUME")))
        assert mounts.keys() <= compose()["volumes"].keys()
    assert "COMPOSE_PROFILES=cpu" in (DOCKER / ".env").read_text(encoding="utf-8").splitlines()


def test_what_is_mounted_is_there() -> None:
    mounted = [
        volume.split(":")
        for service in compose()["services"].values()
        for volume in service["volumes"]
        if volume.startswith(".")
    ]
    assert len(mounted) == 4
    for source, _, mode in mounted:
        assert (DOCKER / source).exists() and mode == "ro"


def test_who_looks_for_whom() -> None:
    """Prometheus for the server, Grafana for Prometheus and for the dashboard."""
    services = compose()["services"]
    prometheus = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = prometheus["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    for name in TARGETS:
        server = services[f"server-{name}"]
        assert host in server["networks"]["default"]["aliases"]
        assert port == last(name, "EXPOSE") == server["ports"][0].split(":")[-1]
    provisioning = DOCKER / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:" + services["prometheus"]["ports"][0].split(":")[-1]
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/bounded_kv.yaml").read_text())[
        "providers"
    ]
    folders = {
        where: (DOCKER / source).resolve()
        for source, where, _ in (volume.split(":") for volume in services["grafana"]["volumes"])
    }
    assert folders["/etc/grafana/provisioning"] == provisioning
    assert folders.get(provider["options"]["path"]) == DASHBOARD.parent
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"


# --- the dashboard and the alerts


def test_every_panel_says_what_it_shows() -> None:
    (source,) = yaml.safe_load(
        (DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"]
    wanted = {"type": source["type"], "uid": source["uid"]}
    titles = [panel["title"] for panel in panels()]
    assert titles and all(titles) and len(set(titles)) == len(titles)
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["targets"], panel["title"]
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == wanted, panel["title"]
        for target in panel["targets"]:
            assert target["legendFormat"], panel["title"]
            assert '"$instance"' in target["expr"], panel["title"]
    (variable,) = dashboard()["templating"]["list"]
    assert (variable["name"], variable["datasource"]) == ("instance", wanted)


def test_no_panel_covers_another() -> None:
    every = dashboard()["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.fixture(scope="module")
def registered(tiny_model: Path) -> Iterator[set[str]]:
    """The samples that a server shows, a series of each at zero."""
    from prometheus_client import REGISTRY
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from bounded_kv_server.metrics import metrics
    from vllm_bounded_kv.metrics import create

    create([0])
    metrics()
    config = EngineArgs(
        model=str(tiny_model), dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20
    ).create_engine_config()
    PrometheusStatLogger(config, [0])
    yield {sample.name for family in REGISTRY.collect() for sample in family.samples}
    unregister_vllm_metrics()


def test_the_names_in_an_expression() -> None:
    expression = """sum by (instance) (rate(a_bucket{le="0.0",x=~"b(c)"}[5m])) / on (le) c:d > 0.2
        and histogram_quantile(0.5, sum(rate(e_total[10m])) without (f)) >= 1e3 or g"""
    assert metric_names(expression) == {"a_bucket", "c:d", "e_total", "g"}


def test_every_metric_is_there(registered: set[str]) -> None:
    used = {name for expression in shown().values() for name in metric_names(expression)}
    for rule in alerts():
        assert metric_names(rule["expr"])
        used |= metric_names(rule["expr"])
    assert used - SCRAPES <= registered


def test_every_metric_of_ours_is_shown(registered: set[str]) -> None:
    used = {name for expression in shown().values() for name in metric_names(expression)}
    family = re.compile(r"_(bucket|sum|count|created)$")
    ours = {name for name in registered if name.startswith("bounded_kv_")}
    missing = {
        name
        for name in ours
        if not name.endswith("_created")
        and not any(family.sub("", other) == family.sub("", name) for other in used)
    }
    assert not missing


def test_buckets_and_labels_that_are_named(registered: set[str]) -> None:
    from bounded_kv_server.metrics import OUTCOMES, metrics

    (underrun,) = metrics().underrun.collect()
    bounds = {s.labels["le"] for s in underrun.samples if s.name.endswith("_bucket")}
    every = [*shown().values(), *(rule["expr"] for rule in alerts())]
    named = {le for expression in every for le in re.findall(r'le="([^"]*)"', expression)}
    assert named and named <= bounds
    outcomes = {o for e in every for o in re.findall(r'outcome=~"([^"]*)"', e)}
    assert outcomes and {o for each in outcomes for o in each.split("|")} <= set(OUTCOMES)


def test_a_silent_engine_is_one_that_a_scrape_has_waited_for() -> None:
    from vllm_bounded_kv.engine.endpoint import FIGURES_TIMEOUT_S

    (rule,) = [rule for rule in alerts() if rule["alert"] == "BoundedKVEngineSilent"]
    assert float(rule["expr"].split(">=")[1]) == FIGURES_TIMEOUT_S
    prometheus = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
    assert not {"scrape_timeout"} & {*prometheus["global"], *prometheus["scrape_configs"][0]}
    assert FIGURES_TIMEOUT_S < 10  # Prometheus's own


def test_every_alert_is_tried_both_ways() -> None:
    tests = yaml.safe_load((DOCKER / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    tried = {
        (case["alertname"], bool(case["exp_alerts"]))
        for test in tests
        for case in test["alert_rule_test"]
    }
    assert tried == {(rule["alert"], fires) for rule in alerts() for fires in (True, False)}


# --- Prometheus's own word


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_its_configuration() -> None:
    promtool("check", "config", str(DOCKER / "prometheus.yml"))


def test_the_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", str(DOCKER / "alerts_test.yml"))


def test_every_expression_parses(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, expression in enumerate(shown().values())
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(file))
