"""The server's policy and a request's share of it: settled values, and every refusal by name."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from vllm_bounded_kv import SinkWindow
from vllm_bounded_kv.engine.policy import EnginePolicy, PolicyError, StreamPolicy
from vllm_bounded_kv.layout import compact_index

MAX_LEN = 4096


def voice_policy(source_len: int) -> SinkWindow:
    """A longer source leaves a shorter window; short ones count no step of their own."""
    return SinkWindow(source_len, 40 - 2 * source_len, window_includes_step=source_len >= 5)


def no_window(source_len: int) -> SinkWindow:
    return SinkWindow(4, 8 - source_len)


def not_a_policy(source_len: int) -> int:
    return source_len


def half_a_sink(source_len: int) -> SinkWindow:
    return SinkWindow(0.5, 8)  # type: ignore[arg-type]


def maybe_includes(source_len: int) -> SinkWindow:
    return SinkWindow(1, 8, "no")  # type: ignore[arg-type]


NOT_CALLABLE = 5
THIS = __name__


def refusal(field: str, value: Any, *reasons: str) -> Any:
    """The error that names field and value, and each of `reasons`."""
    rest = "".join(f"(?=.*{re.escape(reason)})" for reason in reasons)
    return pytest.raises(PolicyError, match=rf"^{re.escape(f'{field}={value!r}: ')}{rest}")


def settled(**values: Any) -> EnginePolicy:
    return EnginePolicy(**values).resolve(MAX_LEN)


# --- the server's policy ---------------------------------------------------------------------


def test_defaults() -> None:
    assert EnginePolicy().to_mapping() == {
        "sink": 4,
        "window": None,
        "max_source_len": 0,
        "max_slots": None,
        "positions": None,
        "position_limit": None,
        "window_includes_step": True,
        "max_pinned_blocks": None,
        "session_idle_s": None,
        "max_sessions": None,
        "retention": None,
        "num_draft_tokens": 0,
    }


@pytest.mark.parametrize(
    ("sink", "max_source_len", "max_model_len", "window"),
    [
        (4, 0, 4096, 2048),
        (4, 0, 2053, 2048),
        (4, 0, 2052, 2048),
        (4, 0, 2051, 2047),
        (4, 100, 2051, 1951),
        (0, 0, 1, 1),
        (9, 3, 10, 1),
    ],
)
def test_the_default_window(
    sink: int, max_source_len: int, max_model_len: int, window: int
) -> None:
    policy = EnginePolicy(sink=sink, max_source_len=max_source_len).resolve(max_model_len)
    assert policy.window == window
    assert policy.largest == StreamPolicy(max(sink, max_source_len), window)
    assert policy.resolve(max_model_len) == policy


def test_a_window_that_is_given_is_kept() -> None:
    assert settled(window=3000).window == 3000


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("sink", -1, "must be >= 0"),
        ("window", 0, "must be >= 1"),
        ("window", -5, "must be >= 1"),
        ("max_source_len", -1, "must be >= 0"),
        ("max_slots", 0, "must be >= 1"),
        ("max_pinned_blocks", -1, "must be >= 0"),
        ("max_pinned_blocks", 1.5, "must be an integer, got float"),
        ("max_sessions", 0, "must be >= 1"),
        ("session_idle_s", 0, "must be finite and > 0"),
        ("session_idle_s", float("inf"), "must be finite and > 0"),
        ("session_idle_s", True, "must be seconds, got bool"),
        ("session_idle_s", "5", "must be seconds, got str"),
        ("sink", True, "must be an integer, got bool"),
        ("sink", 4.0, "must be an integer, got float"),
        ("sink", "4", "must be an integer, got str"),
        ("sink", None, "must be an integer, got NoneType"),
        ("window", False, "must be an integer, got bool"),
        ("window", 1.5, "must be an integer, got float"),
        ("window", "64", "must be an integer, got str"),
        ("max_source_len", "10", "must be an integer, got str"),
        ("max_slots", 2.0, "must be an integer, got float"),
        ("positions", "relative", "must be one of absolute, rebase"),
        ("positions", 3, "must be one of absolute, rebase"),
        ("position_limit", 0, "must be >= 1"),
        ("position_limit", "9", "must be an integer, got str"),
        ("window_includes_step", 1, "must be true or false"),
        ("window_includes_step", "yes", "must be true or false"),
    ],
)
def test_a_bad_setting_is_refused(field: str, value: Any, reason: str) -> None:
    with refusal(field, value, reason) as caught:
        EnginePolicy.from_mapping({field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with refusal("windows", 5, "unknown", "'max_slots'", "'sink'", "'window'"):
        EnginePolicy.from_mapping({"sink": 4, "windows": 5})


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ({"sink": 4, "window": 4093}, 4097),
        ({"sink": 0, "window": 4097}, 4097),
        ({"sink": 4, "max_source_len": 100, "window": 4000}, 4100),
        ({"sink": 4, "window": 4093, "window_includes_step": False}, 4098),
    ],
)
def test_more_than_the_models_length_is_refused(values: dict[str, Any], total: int) -> None:
    with refusal("sink + window", total, f"max_model_len={MAX_LEN}"):
        settled(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"sink": 4, "window": 4092},
        {"sink": 0, "window": 4096},
        {"sink": 4, "window": 4092, "window_includes_step": False},
    ],
)
def test_exactly_the_models_length_is_allowed(values: dict[str, Any]) -> None:
    assert settled(**values).largest.capacity - (not values.get("window_includes_step", True)) == (
        MAX_LEN
    )


@pytest.mark.parametrize("sink", [MAX_LEN, MAX_LEN + 5])
def test_a_sink_that_leaves_no_window_is_refused(sink: int) -> None:
    with refusal("max(sink, max_source_len)", sink, f"max_model_len={MAX_LEN}"):
        settled(sink=sink)


def test_what_travels_between_processes_is_the_same_policy() -> None:
    policy = settled(sink=7, window=64, max_source_len=9, max_slots=3, window_includes_step=False)
    assert EnginePolicy.from_mapping(policy.to_mapping()) == policy


# --- a policy callable -----------------------------------------------------------------------


def test_a_callable_decides_by_source_length() -> None:
    policy = settled(max_source_len=10, retention=f"{THIS}:voice_policy")
    for length in range(11):
        ring = 40 - 2 * length + (length < 5)
        assert policy.for_request({"kv_source_len": length}, 50) == StreamPolicy(length, ring)
    assert policy.default == StreamPolicy(0, 41)
    assert (policy.max_sink, policy.max_ring) == (10, 41)
    assert policy.largest == StreamPolicy(0, 41)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "must be written module:function"),
        ("no_colon", "must be written module:function"),
        (":voice_policy", "must be written module:function"),
        (f"{THIS}:", "must be written module:function"),
        (7, "must be written module:function"),
        ("no_such_module_anywhere:f", "cannot be imported: No module named"),
        (f"{THIS}:no_such_function", "cannot be imported"),
        (".relative:f", "cannot be imported"),
        (f"{THIS}:NOT_CALLABLE", "is not callable"),
    ],
)
def test_a_bad_path_to_a_callable_is_refused(path: Any, reason: str) -> None:
    with refusal("retention", path, reason):
        EnginePolicy(retention=path)


@pytest.mark.parametrize(
    ("name", "field", "value", "reason"),
    [
        ("no_window", "retention(8).window", 0, "must be >= 1"),
        ("not_a_policy", "retention(0)", 0, "must return a SinkWindow"),
        ("half_a_sink", "retention(0).sink", 0.5, "must be an integer, got float"),
        ("maybe_includes", "retention(0).window_includes_step", "no", "must be true or false"),
    ],
)
def test_what_a_callable_returns_is_checked_for_every_length(
    name: str, field: str, value: Any, reason: str
) -> None:
    with refusal(field, value, reason):
        EnginePolicy(max_source_len=9, retention=f"{THIS}:{name}")


def test_a_callable_and_a_window_exclude_each_other() -> None:
    with refusal("window", 64, "retention"):
        EnginePolicy(window=64, retention=f"{THIS}:voice_policy")


def test_a_callable_must_fit_the_models_length() -> None:
    policy = EnginePolicy(max_source_len=10, retention=f"{THIS}:voice_policy")
    assert policy.resolve(41) == replace(policy, positions="absolute")
    with refusal("sink + window", 41, "max_model_len=39"):
        policy.resolve(39)


@pytest.mark.parametrize("key", ["kv_sink", "kv_window"])
def test_a_request_cannot_overrule_a_callable(key: str) -> None:
    policy = settled(max_source_len=10, retention=f"{THIS}:voice_policy")
    with refusal(key, 1, "retention callable"):
        policy.for_request({key: 1}, 50)


# --- positions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "max_positions", "expected"),
    [
        ({"window": 96}, 8192, ("rebase", 400)),
        ({"window": 96}, 300, ("rebase", 300)),
        ({"window": 96}, 101, ("rebase", 101)),
        ({"window": 96, "max_source_len": 54}, 8192, ("rebase", 600)),
        ({"window": 96, "position_limit": 101}, 8192, ("rebase", 101)),
        ({"window": 96, "positions": "absolute"}, 8192, ("absolute", None)),
        ({"window": 96}, 100, ("absolute", None)),  # no position is left over
        ({"window": 96}, None, ("absolute", None)),
    ],
)
def test_settled_positions(
    values: dict[str, Any], max_positions: int | None, expected: tuple[str, int | None]
) -> None:
    policy = EnginePolicy(**values).resolve(MAX_LEN, max_positions)
    assert (policy.positions, policy.position_limit) == expected
    assert policy.resolve(MAX_LEN, max_positions) == policy


def test_a_model_that_cannot_rebase_is_absolute_unless_asked() -> None:
    policy = EnginePolicy(window=96).resolve(MAX_LEN, 8192, "it has no wheels")
    assert policy.positions == "absolute"
    with refusal("--bounded-kv-positions", "rebase", "it has no wheels", "use --bounded-kv-pos"):
        EnginePolicy(window=96, positions="rebase").resolve(MAX_LEN, 8192, "it has no wheels")
    with refusal("--bounded-kv-position-limit", 500, "absolute, which this model", "no wheels"):
        EnginePolicy(window=96, position_limit=500).resolve(MAX_LEN, 8192, "it has no wheels")


@pytest.mark.parametrize("limit", [1, 100, 8193])
def test_a_position_limit_outside_capacity_and_table_is_refused(limit: int) -> None:
    with refusal("--bounded-kv-position-limit", limit, "above sink + window=100", "8192 positions"):
        EnginePolicy(window=96, position_limit=limit).resolve(MAX_LEN, 8192)


def test_a_position_limit_of_absolute_positions_is_refused() -> None:
    with refusal("--bounded-kv-position-limit", 500, "no effect with --bounded-kv-positions abs"):
        EnginePolicy(window=96, positions="absolute", position_limit=500).resolve(MAX_LEN, 8192)


def test_the_default_window_leaves_positions_over_where_streams_outlive_them() -> None:
    policy = EnginePolicy().resolve(1_000_000, 2048)
    assert (policy.window, policy.positions, policy.position_limit) == (1020, "rebase", 2048)
    assert EnginePolicy().resolve(2048, 2048).window == 2044


@pytest.mark.parametrize("values", [{"sink": 9}, {"window_includes_step": False}])
def test_a_callable_stands_alone(values: dict[str, Any]) -> None:
    ((field, value),) = values.items()
    with refusal(field, value, "is decided by retention"):
        EnginePolicy(max_source_len=10, retention=f"{THIS}:voice_policy", **values)


def test_a_window_that_leaves_no_position_over_cannot_rebase() -> None:
    with refusal("--bounded-kv-positions", "rebase", "sink + window=100", "100 positions"):
        EnginePolicy(window=96, positions="rebase").resolve(MAX_LEN, 100)


# --- a request -------------------------------------------------------------------------------

SERVER: dict[str, Any] = {"sink": 5, "window": 96, "max_source_len": 40}


@pytest.mark.parametrize(
    ("args", "sink", "ring"),
    [
        (None, 5, 96),
        ({}, 5, 96),
        ({"kv_source_len": 0}, 5, 96),
        ({"kv_source_len": 3}, 5, 96),
        ({"kv_source_len": 40}, 40, 96),
        ({"kv_source_len": 40, "kv_sink": 2}, 2, 96),
        ({"kv_sink": 0}, 0, 96),
        ({"kv_sink": 40}, 40, 96),
        ({"kv_window": 1}, 5, 1),
        ({"kv_window": 96, "kv_sink": 9, "kv_source_len": 4}, 9, 96),
        ({"kv_transfer_params": {"a": 1}, "kv_cache_report_mode": "full"}, 5, 96),
        ({"temperature_hint": -3, "KV_SINK": 9, "my_kv_sink": "x"}, 5, 96),
    ],
)
def test_what_a_request_gets(args: dict[str, Any] | None, sink: int, ring: int) -> None:
    assert settled(**SERVER).for_request(args, 50) == StreamPolicy(sink, ring)
    without = settled(**SERVER, window_includes_step=False)
    assert without.for_request(args, 50) == StreamPolicy(sink, ring + 1)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("kv_source_len", 41, "limit 40 (max_source_len)"),
        ("kv_source_len", -1, "must be >= 0"),
        ("kv_sink", 41, "limit 40 "),
        ("kv_sink", -1, "must be >= 0"),
        ("kv_window", 97, "limit 96 (window)"),
        ("kv_window", 0, "must be >= 1"),
        ("kv_window", True, "must be an integer, got bool"),
        ("kv_window", 8.0, "must be an integer, got float"),
        ("kv_sink", "4", "must be an integer, got str"),
        ("kv_source_len", None, "must be an integer, got NoneType"),
        ("kv_source_len", [3], "must be an integer, got list"),
        ("kv_windows", 8, "unknown argument; known: kv_source_len, kv_sink, kv_window"),
        ("kv_", 8, "unknown argument"),
    ],
)
def test_a_bad_argument_is_refused(key: str, value: Any, reason: str) -> None:
    with refusal(key, value, reason) as caught:
        settled(**SERVER).for_request({key: value}, 50)
    assert caught.value.field == key


def test_the_sinks_limit_is_the_larger_of_sink_and_source() -> None:
    policy = settled(sink=30, window=8, max_source_len=10)
    assert policy.for_request({"kv_sink": 30}, 50).sink == 30
    with refusal("kv_sink", 31, "limit 30"):
        policy.for_request({"kv_sink": 31}, 50)


def test_a_source_must_be_in_the_prompt() -> None:
    policy = settled(**SERVER)
    assert policy.for_request({"kv_source_len": 20}, 20).sink == 20
    with refusal("kv_source_len", 20, "longer than the prompt, which has 19 tokens"):
        policy.for_request({"kv_source_len": 20}, 19)
    assert policy.for_request({"kv_source_len": 20}, None).sink == 20  # the prompt is to come


def test_no_request_outgrows_the_slot() -> None:
    policy = settled(**SERVER, window_includes_step=False)
    largest = policy.for_request({"kv_sink": 40, "kv_window": 96, "kv_source_len": 40}, 50)
    assert largest == policy.largest


# --- a stream --------------------------------------------------------------------------------


def test_footprint_and_wraps_by_brute_force() -> None:
    for sink, spare in itertools.product(range(5), (0, 1, 3)):
        for ring in range(1, 6):
            stream = StreamPolicy(sink, ring, spare)
            assert stream.capacity == sink + ring
            entries: set[int] = set()
            wraps = 0
            for n in range(5 * (sink + ring + spare)):
                assert stream.num_wraps(n) == wraps
                assert stream.num_retained(n) == min(len(entries), stream.capacity)
                entry = compact_index(n, sink, ring + spare)
                wraps += entry == sink and entry in entries and n > sink
                entries.add(entry)
            for size in (1, 2, 3, 16):
                blocks = {entry // size for entry in entries}
                assert stream.num_blocks(size) == len(blocks)
                inside = {b for b in blocks if (b + 1) * size <= sink}
                assert stream.num_immutable_blocks(size) == len(inside)
