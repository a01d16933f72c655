"""Prometheus's own programs, where they are installed, and the expressions in docker/."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD = DOCKER / "grafana/dashboards/bounded_kv.json"


def program(name: str) -> str:
    """The path of `promtool` or `prometheus`; the test is skipped where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} here (Debian: apt-get install prometheus)")
    return path


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def panels() -> Iterator[dict[str, Any]]:
    """Those that show something."""
    return (panel for panel in dashboard()["panels"] if panel["type"] != "row")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DOCKER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def shown() -> dict[str, str]:
    """Every expression of the dashboard by panel and number, as Grafana would ask it."""
    return {
        f"{panel['title']}, {target['refId']}": as_asked(target["expr"])
        for panel in panels()
        for target in panel["targets"]
    }


def as_asked(expression: str, interval: str = "1m", instance: str = ".*") -> str:
    """With a value for each of Grafana's variables."""
    asked = expression.replace("$__rate_interval", interval).replace("$instance", instance)
    assert "$" not in asked, expression
    return asked


WORDS = {
    "and",
    "or",
    "unless",
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "bool",
}


def metric_names(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", expression)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    found = re.findall(r"(?<![\w:.])[a-zA-Z_:][a-zA-Z0-9_:]*(?!\w|:|\s*\()", bare)
    return set(found) - WORDS
