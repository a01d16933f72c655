"""The policy that tests of falling positions share."""

from __future__ import annotations

from typing import Any

SINK, WINDOW, MAX_SOURCE = 5, 60, 64
CAPACITY, LARGEST = SINK + WINDOW, MAX_SOURCE + WINDOW
LIMIT = 140
PERIOD = LIMIT - CAPACITY
POLICY: dict[str, Any] = {
    "sink": SINK,
    "window": WINDOW,
    "max_source_len": MAX_SOURCE,
    "positions": "rebase",
}
OVER_SOURCE = {"kv_source_len": MAX_SOURCE}
