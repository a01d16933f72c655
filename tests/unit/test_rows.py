"""The vectorised plan equals the plain one, int for int."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vllm_bounded_kv.config import BoundedKVConfig, SinkWindow
from vllm_bounded_kv.layout import ROW_INTS, plan_row
from vllm_bounded_kv.rows import Policies, plan_rows

BATCHES, ROWS = 500, 64


def config(rng: random.Random) -> BoundedKVConfig:
    low = rng.choice([0, 0, 2])
    base, slope = rng.randint(0, 9), rng.choice([0, 1, 3])
    ring, includes = rng.choice([0, 1, 4, 9, 31]), rng.random() < 0.5
    if slope:

        def retention(source_len: int) -> SinkWindow:
            return SinkWindow(
                base + slope * source_len % 7,
                ring + source_len % 3,
                includes ^ bool(source_len % 2),
            )
    else:

        def retention(source_len: int) -> SinkWindow:
            return SinkWindow(base, ring, includes)

    return BoundedKVConfig(1, 1, 1, 1, low + rng.randint(0, 12), retention, min_source_len=low)


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_equal_the_plain_plan(reverse: bool) -> None:
    rng = random.Random(int(reverse))
    for _ in range(BATCHES):
        plain = config(rng)
        settings = BoundedKVConfig(
            *(1, 1, 1, 1, plain.max_source_len, plain.retention_for),
            min_source_len=plain.min_source_len,
            reverse_step_order=reverse,
        )
        segments = [
            (
                rng.randrange(32),
                rng.randint(-1, 5),
                rng.randint(settings.min_source_len, settings.max_source_len),
                rng.choice([0, 1, rng.randint(0, 20), rng.randint(0, 10**9)]),
                rng.choice([0, 1, rng.randint(0, 50)]),
            )
            for _ in range(ROWS)
        ]
        out = np.full((ROWS, ROW_INTS), -7, dtype=np.int32)
        plan_rows(Policies.of(settings), np.array(segments).T, out)
        for (slot, source, source_len, written, span), row in zip(segments, out, strict=True):
            expected = plan_row(
                settings.retention_for(source_len),
                sink_capacity=settings.sink_capacity,
                slot=slot,
                source_len=source_len,
                written=written,
                span=span,
                source=source,
                reverse_step_order=reverse,
            )
            assert tuple(row) == expected.as_ints()


def test_an_empty_step_has_no_rows() -> None:
    policies = Policies.of(BoundedKVConfig(1, 1, 1, 1, 0, SinkWindow(1, 2)))
    plan_rows(policies, np.empty((5, 0), np.int64), np.empty((0, ROW_INTS), np.int32))
