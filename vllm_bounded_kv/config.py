"""What a model declares: how much of a stream is kept, and where each request stands in it.

Everything here is checked when it is built, so whatever holds one of these objects need not check
again. Every refusal is a `ValueError` that names the field, its value and the limit.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from vllm_bounded_kv.manager import BoundedKVManager

MAX_INDEX = 2**31 - 1
"""A plan's rows are int32."""
MAX_LENGTH = 2**62
"""Of a stream: sums of two stay within an int64."""


@dataclass(frozen=True)
class SinkWindow:
    """Keep the first `sink` entries of a stream and its last `window`.

    All counts are entries (tokens). Values are checked where the policy is put to use
    (`BoundedKVConfig`, or the engine's own policy), because limits differ between the two.
    """

    sink: int
    """Entries kept from the start of the stream, source prefix included."""
    window: int
    """Entries kept from its end."""
    window_includes_step: bool = False
    """Whether the tokens that a step adds take up places in that step's window."""


RetentionPolicy = SinkWindow | Callable[[int], SinkWindow]
"""One policy for all, or a function from source length (entries) to policy."""


@dataclass(frozen=True)
class BoundedKVConfig:
    """The KV geometry of a model and what it retains; sizes the pool of slots.

    A callable `retention` is evaluated once per allowed source length, here and never again.

    Raises:
        ValueError: a field has the wrong type or is out of range, or `retention` gives a policy
            that is, for some allowed source length. The message names field, value and limit.
    """

    num_layers: int
    num_heads: int
    """KV heads (`H_kv`)."""
    head_dim: int
    rows_per_request: int
    """KV rows a request owns per layer; 2 serves batched classifier-free guidance."""
    max_source_len: int
    """Longest source prefix, in entries."""
    retention: RetentionPolicy
    max_slots: int = 32
    min_source_len: int = 0
    """Shortest source prefix, in entries."""
    dtype: torch.dtype | None = torch.float32
    """Storage type; `None` takes the engine's KV type, settled when the pool is built."""
    reverse_step_order: bool = False
    """Whether a step's tokens join the stream last-first."""
    query_window: int | None = None
    """`None`: all queries of a step see the same keys. Set: each sees distances `[0, this]`."""
    _policies: tuple[SinkWindow, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "num_heads",
            "head_dim",
            "rows_per_request",
            "max_slots",
        ):
            _check_int(name, getattr(self, name), minimum=1)
        _check_int("max_source_len", self.max_source_len, minimum=0)
        _check_int("min_source_len", self.min_source_len, minimum=0)
        if self.min_source_len > self.max_source_len:
            limit = f"at most max_source_len ({self.max_source_len})"
            _refuse("min_source_len", self.min_source_len, limit)
        _check_bool("reverse_step_order", self.reverse_step_order)
        self._check_dtype()
        self._check_query_window()
        object.__setattr__(self, "_policies", tuple(self._evaluate_retention()))

    def retention_for(self, source_len: int) -> SinkWindow:
        """The policy of a stream whose source prefix has `source_len` entries.

        Raises:
            ValueError: `source_len` is outside `[min_source_len, max_source_len]`.
        """
        if not self.min_source_len <= source_len <= self.max_source_len:
            limits = f"[{self.min_source_len}, {self.max_source_len}]"
            _refuse(
                "source_len",
                source_len,
                f"in [min_source_len, max_source_len] = {limits}",
            )
        return self._policies[source_len - self.min_source_len]

    @cached_property
    def sink_capacity(self) -> int:
        """Entries of a slot set aside for the written part of the sink.

        The largest need is not always the longest source's: with a fixed sink it is the
        shortest source that leaves the most of the sink to be written.
        """
        policies = enumerate(self._policies, self.min_source_len)
        return max(0, max(policy.sink - source_len for source_len, policy in policies))

    @cached_property
    def window_capacity(self) -> int:
        """Entries of a slot's ring: the largest window of any allowed source length."""
        return max(policy.window for policy in self._policies)

    @cached_property
    def max_retained(self) -> int:
        """Most entries that a step can find retained, source entries included."""
        return max(policy.sink + policy.window for policy in self._policies)

    @cached_property
    def slot_tokens(self) -> int:
        """Entries of one slot, per layer and row."""
        return self.sink_capacity + self.window_capacity

    def with_max_slots(self, max_slots: int) -> "BoundedKVConfig":
        """A copy with another number of slots; `retention` is not evaluated again.

        Raises:
            ValueError: `max_slots` is not an int of at least 1.
        """
        _check_int("max_slots", max_slots, minimum=1)
        config = copy.copy(self)
        object.__setattr__(config, "max_slots", max_slots)
        return config

    def with_dtype(self, dtype: torch.dtype) -> "BoundedKVConfig":
        """A copy with a storage type; `retention` is not evaluated again.

        Raises:
            ValueError: `dtype` is not a floating-point type.
        """
        config = copy.copy(self)
        object.__setattr__(config, "dtype", dtype)
        config._check_dtype()
        return config

    def _check_dtype(self) -> None:
        if self.dtype is None:
            return
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            _refuse("dtype", self.dtype, "a floating-point torch.dtype or None")

    def _check_query_window(self) -> None:
        if self.query_window is None:
            return
        _check_int("query_window", self.query_window, minimum=0)
        if self.reverse_step_order:
            _refuse("query_window", self.query_window, "None when reverse_step_order is set")

    def _evaluate_retention(self) -> list[SinkWindow]:
        """One checked policy per allowed source length, shortest source first."""
        lengths = range(self.min_source_len, self.max_source_len + 1)
        if isinstance(self.retention, SinkWindow):
            self._check_policy(self.retention, self.min_source_len)
            return [self.retention] * len(lengths)
        if not callable(self.retention):
            _refuse(
                "retention",
                self.retention,
                "a SinkWindow or a callable that returns one",
            )
        policies = [self.retention(source_len) for source_len in lengths]
        for source_len, policy in zip(lengths, policies, strict=True):
            self._check_policy(policy, source_len)
        return policies

    def _check_policy(self, policy: Any, source_len: int) -> None:
        where = f" (at source_len {source_len})"
        if not isinstance(policy, SinkWindow):
            _refuse(
                "retention",
                policy,
                "a SinkWindow or a callable that returns one" + where,
            )
        _check_int("retention.sink", policy.sink, minimum=0, where=where)
        _check_int("retention.window", policy.window, minimum=0, where=where)
        _check_bool("retention.window_includes_step", policy.window_includes_step, where=where)
        if self.query_window is None:
            return
        where = f" when query_window is {self.query_window}{where}"
        if policy.sink != 0:
            _refuse("retention.sink", policy.sink, "0" + where)
        if policy.window_includes_step:
            _refuse("retention.window_includes_step", True, "False" + where)
        if policy.window < self.query_window:
            _refuse("retention.window", policy.window, "at least query_window" + where)


@dataclass
class BoundedKVSpec:
    """What a model declares to be given a pool of slots."""

    config: BoundedKVConfig

    @property
    def resource_class(self) -> "type[BoundedKVManager]":
        """The manager class of the slot pool, imported when it is asked for."""
        from vllm_bounded_kv.manager import BoundedKVManager

        return BoundedKVManager

    def apply_yaml_overrides(self, max_slots: int | None = None) -> None:
        """Set what a deployment may choose; changes this spec in place. `None` keeps the model's.

        Raises:
            ValueError: `max_slots` is not an int of at least 1.
        """
        if max_slots is not None:
            self.config = self.config.with_max_slots(max_slots)


@dataclass(frozen=True)
class StreamPosition:
    """Where a request stands when a step starts.

    Raises:
        ValueError: a length is negative, `source` is below -1, or one is beyond what a plan holds.
    """

    source_len: int
    """Entries of its source prefix."""
    written: int
    """Entries it wrote before this step."""
    source: int = 0
    """Which of the sources given to `attend` is its own; -1: its entry of the per-row sources."""

    def __post_init__(self) -> None:
        for name, minimum, maximum in (
            ("source_len", 0, MAX_LENGTH),
            ("written", 0, MAX_LENGTH),
            ("source", -1, MAX_INDEX),
        ):
            value = getattr(self, name)
            _check_int(name, value, minimum)
            if value > maximum:
                _refuse(name, value, f"at most {maximum}")
            if type(value) is not int:  # a NumPy int of few bits would overflow in a sum
                object.__setattr__(self, name, int(value))

    @property
    def num_entries(self) -> int:
        """Entries in the stream when the step starts."""
        return self.source_len + self.written


@dataclass(frozen=True)
class BoundedKVStep:
    """One step of a batch: who takes part, and how many tokens each adds.

    A segment whose request has no position is allowed here: `admit` refuses it, with a reason.

    Raises:
        ValueError: a segment is not a `(request_id, span)` pair, a span is negative, a request
            appears twice, or a position is not a `StreamPosition`.
    """

    segments: Sequence[tuple[str, int]]
    """`(request_id, span)` in batch order; `span` tokens of the step join the stream, 0 or more."""
    positions: Mapping[str, StreamPosition]
    """Request id to where it stands when the step starts."""

    def __post_init__(self) -> None:
        # Copies, so that a caller's later edits cannot change a step that was checked.
        object.__setattr__(self, "segments", tuple(_checked_segments(self.segments)))
        object.__setattr__(self, "positions", dict(self.positions))
        for request_id, position in self.positions.items():
            if not isinstance(position, StreamPosition):
                _refuse(f"positions[{request_id!r}]", position, "a StreamPosition")


def _checked_segments(segments: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    checked: dict[str, int] = {}
    for index, segment in enumerate(segments):
        if not isinstance(segment, tuple | list) or len(segment) != 2:
            _refuse(f"segments[{index}]", segment, "a (request_id, span) pair")
        request_id, span = segment
        _check_int(f"segments[{index}].span", span, minimum=0)
        if request_id in checked:
            # Both would start from the one declared position and write the same entries.
            _refuse(f"segments[{index}].request_id", request_id, "in the step only once")
        checked[request_id] = int(span)
    return list(checked.items())


def _check_int(name: str, value: Any, minimum: int, where: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        _refuse(name, value, "an int" + where)
    if value < minimum:
        _refuse(name, value, f"at least {minimum}{where}")


def _check_bool(name: str, value: Any, where: str = "") -> None:
    if not isinstance(value, bool):
        _refuse(name, value, "a bool" + where)


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise ValueError(f"{name} must be {expected}, got {value!r}")
