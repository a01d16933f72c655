"""Declarations: defaults, derived sizes, and every refusal naming field, value and limit."""

import dataclasses
import pickle
import re
from typing import Any

import pytest
import torch

import vllm_bounded_kv
from vllm_bounded_kv import (
    BoundedKVConfig,
    BoundedKVSpec,
    BoundedKVStep,
    SinkWindow,
    StreamPosition,
)


def make(**overrides: Any) -> BoundedKVConfig:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "num_heads": 4,
        "head_dim": 8,
        "rows_per_request": 1,
        "max_source_len": 10,
        "retention": SinkWindow(4, 6),
    }
    return BoundedKVConfig(**{**fields, **overrides})


def test_defaults() -> None:
    config = make()
    assert config.max_slots == 32
    assert config.min_source_len == 0
    assert config.dtype == torch.float32
    assert config.reverse_step_order is False
    assert config.query_window is None
    assert SinkWindow(1, 2).window_includes_step is False
    assert StreamPosition(1, 2).source == 0
    assert make(dtype=None).dtype is None


def test_exports_are_the_declarations() -> None:
    assert sorted(vllm_bounded_kv.__all__) == [
        "BoundedKVConfig",
        "BoundedKVSpec",
        "BoundedKVStep",
        "SinkWindow",
        "StreamPosition",
    ]


def test_a_fixed_sink_is_sized_by_the_shortest_source() -> None:
    config = make(min_source_len=1, max_source_len=10)
    assert config.sink_capacity == 3
    assert config.window_capacity == 6
    assert config.slot_tokens == 9
    assert config.max_retained == 10


def test_a_sink_within_every_source_needs_no_slot_entries() -> None:
    assert make(min_source_len=5).sink_capacity == 0


def test_derived_sizes_of_a_callable_equal_brute_force() -> None:
    for seed in range(200):
        low, high = seed % 5, seed % 5 + seed % 7

        def policy(s: int, seed: int = seed) -> SinkWindow:
            return SinkWindow((7 * s + seed) % 11, (5 * s + 3 * seed) % 13)

        config = make(min_source_len=low, max_source_len=high, retention=policy)
        lengths = range(low, high + 1)
        assert [config.retention_for(s) for s in lengths] == [policy(s) for s in lengths]
        assert config.sink_capacity == max([0] + [policy(s).sink - s for s in lengths])
        assert config.window_capacity == max(policy(s).window for s in lengths)
        assert config.max_retained == max(policy(s).sink + policy(s).window for s in lengths)
        assert config.slot_tokens == config.sink_capacity + config.window_capacity


def test_a_callable_is_evaluated_once_per_source_length() -> None:
    asked: list[int] = []

    def policy(source_len: int) -> SinkWindow:
        asked.append(source_len)
        return SinkWindow(source_len, 3)

    config = make(min_source_len=2, max_source_len=5, retention=policy)
    spec = BoundedKVSpec(config)
    spec.apply_yaml_overrides(max_slots=2)
    for _ in range(2):
        assert spec.config.retention_for(4) == SinkWindow(4, 3)
        assert config.slot_tokens == 3
    assert asked == [2, 3, 4, 5]


@pytest.mark.parametrize("source_len", [1, 11])
def test_retention_for_refuses_other_source_lengths(source_len: int) -> None:
    with pytest.raises(ValueError, match=rf"source_len .*\[2, 10\], got {source_len}"):
        make(min_source_len=2).retention_for(source_len)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_slots": 0}, "max_slots must be at least 1, got 0"),
    ({"max_slots": -3}, "max_slots must be at least 1, got -3"),
    ({"max_slots": True}, "max_slots must be an int, got True"),
    ({"max_slots": 2.0}, "max_slots must be an int, got 2.0"),
    ({"max_slots": None}, "max_slots must be an int, got None"),
    ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
    ({"rows_per_request": 0}, "rows_per_request must be at least 1, got 0"),
    ({"rows_per_request": "2"}, "rows_per_request must be an int, got '2'"),
    ({"max_source_len": -1}, "max_source_len must be at least 0, got -1"),
    ({"min_source_len": -1}, "min_source_len must be at least 0, got -1"),
    ({"min_source_len": 11}, "min_source_len must be at most max_source_len (10), got 11"),
    ({"dtype": "float32"}, "dtype must be a floating-point torch.dtype or None, got 'float32'"),
    ({"dtype": torch.int8}, "dtype must be a floating-point torch.dtype or None, got torch.int8"),
    ({"reverse_step_order": 1}, "reverse_step_order must be a bool, got 1"),
    ({"retention": SinkWindow(-1, 6)}, "retention.sink must be at least 0 (at source_len 0)"),
    ({"retention": SinkWindow(4, -2)}, "retention.window must be at least 0 (at source_len 0)"),
    ({"retention": SinkWindow(4.5, 2)}, "retention.sink must be an int"),  # type: ignore[arg-type]
    ({"retention": SinkWindow(4, True)}, "retention.window must be an int"),
    (
        {"retention": SinkWindow(4, 6, 1)},  # type: ignore[arg-type]
        "retention.window_includes_step must be a bool (at source_len 0), got 1",
    ),
    ({"retention": (4, 6)}, "retention must be a SinkWindow or a callable"),
    (
        {"retention": lambda s: SinkWindow(7 - s, 6)},
        "retention.sink must be at least 0 (at source_len 8), got -1",
    ),
    (
        {"retention": lambda s: SinkWindow(0, 7 - s)},
        "retention.window must be at least 0 (at source_len 8), got -1",
    ),
    ({"retention": lambda s: (s, 6)}, "(at source_len 0), got (0, 6)"),
    ({"query_window": -1}, "query_window must be at least 0, got -1"),
    ({"query_window": 1.5}, "query_window must be an int, got 1.5"),
    (
        {"query_window": 3, "reverse_step_order": True, "retention": SinkWindow(0, 6)},
        "query_window must be None when reverse_step_order is set, got 3",
    ),
    (
        {"query_window": 3, "retention": SinkWindow(4, 6)},
        "retention.sink must be 0 when query_window is 3 (at source_len 0), got 4",
    ),
    (
        {"query_window": 3, "retention": SinkWindow(0, 6, True)},
        "retention.window_includes_step must be False when query_window is 3",
    ),
    (
        {"query_window": 7, "retention": SinkWindow(0, 6)},
        "retention.window must be at least query_window when query_window is 7",
    ),
    (
        {"query_window": 5, "retention": lambda s: SinkWindow(0, 9 if s < 6 else 4)},
        "(at source_len 6), got 4",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_refusals_name_field_value_and_limit(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**overrides)


def test_borders_are_allowed() -> None:
    make(max_slots=1, min_source_len=10)
    make(max_source_len=0, retention=SinkWindow(0, 0))
    make(query_window=6, retention=SinkWindow(0, 6))
    make(query_window=0, retention=SinkWindow(0, 0))


def test_configs_are_values() -> None:
    assert make() == make()
    assert make() != make(max_slots=3)
    assert hash(make()) == hash(make())
    config = pickle.loads(pickle.dumps(make(min_source_len=1)))
    assert config == make(min_source_len=1)
    assert config.slot_tokens == 9
    assert dataclasses.replace(config, min_source_len=2).sink_capacity == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_slots = 3


def test_a_deployment_sets_max_slots_and_nothing_else() -> None:
    config = make()
    spec = BoundedKVSpec(config)
    spec.apply_yaml_overrides()
    assert spec.config is config
    spec.apply_yaml_overrides(max_slots=5)
    assert spec.config == make(max_slots=5)
    assert config.max_slots == 32
    with pytest.raises(ValueError, match="max_slots must be at least 1, got 0"):
        spec.apply_yaml_overrides(max_slots=0)
    assert spec.config.max_slots == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0), "source_len must be at least 0, got -1"),
        ((0, -1), "written must be at least 0, got -1"),
        ((0, 0, -2), "source must be at least -1, got -2"),
        ((0, 1.0), "written must be an int, got 1.0"),
    ],
)
def test_positions_are_checked(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        StreamPosition(*arguments)


def test_a_position_counts_the_stream() -> None:
    assert StreamPosition(3, 4, source=-1).num_entries == 7


def test_a_step_may_lack_a_position_and_keeps_what_it_was_given() -> None:
    segments = [("a", 2), ("b", 0)]
    positions = {"a": StreamPosition(3, 4)}
    step = BoundedKVStep(segments, positions)
    segments.clear()
    positions.clear()
    assert step.segments == (("a", 2), ("b", 0))
    assert step.positions == {"a": StreamPosition(3, 4)}


@pytest.mark.parametrize(
    ("segments", "positions", "message"),
    [
        ([("a", -1)], {}, "segments[0].span must be at least 0, got -1"),
        ([("a", 1), ("b", True)], {}, "segments[1].span must be an int, got True"),
        (["ab"], {}, "segments[0] must be a (request_id, span) pair, got 'ab'"),
        ([("a", 1), ("a", 2)], {}, "segments[1].request_id must be in the step only once"),
        ([("a", 1)], {"a": (3, 4)}, "positions['a'] must be a StreamPosition, got (3, 4)"),
    ],
)
def test_steps_are_checked(segments: Any, positions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BoundedKVStep(segments, positions)
