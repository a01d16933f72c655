"""What the engine retains: the server's policy, and each stream's share of it.

A decoder-only model keeps, for the query at stream position `p`, the entries `[0, sink)` and
`(p - ring, p]`. `EnginePolicy` is what the operator declares once; `StreamPolicy` is what one
request gets, pinned when it is added. Everything that needs a footprint (admission, sizing, the
start-up line, metrics) asks `StreamPolicy.num_blocks`: one function, so they cannot disagree.

Imports no vLLM: the same arithmetic runs in the front end, the engine core and the workers.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_bounded_kv.config import SinkWindow
from vllm_bounded_kv.layout import immutable_blocks, num_valid, ring_capacity, slot_blocks
from vllm_bounded_kv.positions import LIMIT_IN_CAPACITIES

DEFAULT_SINK = 4
DEFAULT_WINDOW = 2048
ABSOLUTE, REBASE = POSITION_MODES = ("absolute", "rebase")
SOURCE_KEY = "kv_source"
"""The argument that names a pinned source; the HTTP server turns it into tokens and a length."""
REQUEST_KEYS = ("kv_source_len", "kv_sink", "kv_window", SOURCE_KEY)


class PolicyError(ValueError):
    """A value that the policy does not allow. `field` names it as the user wrote it."""

    def __init__(self, field: str, value: Any, reason: str) -> None:
        super().__init__(f"{field}={value!r}: {reason}")
        self.field = field
        self.value = value


@dataclass(frozen=True)
class StreamPolicy:
    """One stream's retention, as the engine lays it out: `sink` entries, then a ring.

    `ring` is the window, or one more where the policy does not count the step's own token.
    """

    sink: int
    ring: int
    spare: int = 0
    """Entries by which the ring in the slot is longer than what queries see of it: drafts that
    are rejected may have overwritten as many (see `docs/design.md`, "Drafts")."""

    @property
    def capacity(self) -> int:
        """Entries that queries see: `B = S + R`."""
        return self.sink + self.ring

    def num_blocks(self, block_size: int) -> int:
        """Blocks the stream takes at admission, shared ones included, and holds to its end."""
        return slot_blocks(self.sink, self.ring + self.spare, block_size)

    def num_immutable_blocks(self, block_size: int) -> int:
        """Leading blocks that are never overwritten, so may be hashed and shared."""
        return immutable_blocks(self.sink, block_size)

    def num_retained(self, num_entries: int) -> int:
        """Entries still held of a stream of `num_entries`."""
        return num_valid(num_entries, self.sink, self.ring)

    def num_wraps(self, num_entries: int) -> int:
        """How often the ring has started over after `num_entries` entries."""
        return max(0, num_entries - 1 - self.sink) // (self.ring + self.spare)


def _require_int(field: str, value: Any, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise PolicyError(field, value, f"must be an integer, got {type(value).__name__}")
    if value < minimum:
        raise PolicyError(field, value, f"must be >= {minimum}")
    return value


def _require_seconds(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyError(field, value, f"must be seconds, got {type(value).__name__}")
    if not 0 < value < math.inf:
        raise PolicyError(field, value, "must be finite and > 0")


def _require_bool(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise PolicyError(field, value, "must be true or false")


@dataclass(frozen=True)
class EnginePolicy:
    """The server's retention policy: what `--bounded-kv-*` declares.

    Fields left at `None` are settled by `resolve`, which needs the model's length.

    Raises:
        PolicyError: (a `ValueError`) naming the field, its value and the limit.
    """

    sink: int = DEFAULT_SINK
    """Entries kept from the start of every stream (attention sinks)."""
    window: int | None = None
    """Most recent entries kept, the query's own included. `None`: `min(2048, what fits the
    model's length beside the sink)`."""
    max_source_len: int = 0
    """Longest source prefix a request may declare; slots are sized for it."""
    max_slots: int | None = None
    """Streams admitted at once. `None`: as many as the pool holds, up to `max_num_seqs`."""
    positions: str | None = None
    """How rotary positions follow the stream: `absolute` is the stream position itself, `rebase`
    falls back before the model's run out. `None`: `rebase` where the model supports it."""
    position_limit: int | None = None
    """Where `rebase` falls back. `None`: four times the largest stream, or what the model knows."""
    window_includes_step: bool = True
    """Whether the window counts the query's own entry, as vLLM's `sliding_window` does."""
    max_pinned_blocks: int | None = None
    """Blocks that pinned sources may hold, kept from the slots. `None`: what `max_slots` leaves."""
    session_idle_s: float | None = None
    """Seconds without input after which a session is ended. `None`: never."""
    max_sessions: int | None = None
    """Sessions open at once; one more ends the one that has been idle longest. `None`: any."""
    retention: str | None = None
    """`module:function`, called with a source length, returning a `SinkWindow`. Replaces `sink`
    and `window`."""
    num_draft_tokens: int = 0
    """Tokens that a draft may have. Not to be set: `settings.settle` takes it from vLLM's
    `speculative_config`."""

    def __post_init__(self) -> None:
        _require_int("sink", self.sink, 0)
        if self.window is not None:
            _require_int("window", self.window, 1)
        _require_int("max_source_len", self.max_source_len, 0)
        _require_int("num_draft_tokens", self.num_draft_tokens, 0)
        if self.max_slots is not None:
            _require_int("max_slots", self.max_slots, 1)
        if self.position_limit is not None:
            _require_int("position_limit", self.position_limit, 1)
        if self.max_pinned_blocks is not None:
            _require_int("max_pinned_blocks", self.max_pinned_blocks, 0)
        if self.max_sessions is not None:
            _require_int("max_sessions", self.max_sessions, 1)
        if self.session_idle_s is not None:
            _require_seconds("session_idle_s", self.session_idle_s)
        if self.positions is not None and self.positions not in POSITION_MODES:
            raise PolicyError(
                "positions", self.positions, f"must be one of {', '.join(POSITION_MODES)}"
            )
        _require_bool("window_includes_step", self.window_includes_step)
        if self.retention is not None and self.window is not None:
            raise PolicyError(
                "window", self.window, "is decided by retention; give one or the other"
            )
        if self.retention is not None and self.sink != DEFAULT_SINK:
            raise PolicyError("sink", self.sink, "is decided by retention; give one or the other")
        if self.retention is not None and not self.window_includes_step:
            raise PolicyError(
                "window_includes_step", False, "is decided by retention, in its SinkWindow"
            )
        if self.retention is not None:
            _ = self._by_source_len  # a callable is evaluated once per source length, now

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EnginePolicy:
        """Build from what was written in flags or files; unknown names are refused."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise PolicyError(
                    name, values[name], f"unknown bounded_kv setting; known: {sorted(known)}"
                )
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """The plain mapping that `from_mapping` reads: what travels between processes."""
        return dataclasses.asdict(self)

    def resolve(
        self, max_model_len: int, max_positions: int | None = None, why_not: str | None = None
    ) -> EnginePolicy:
        """Settle window and positions, and check that one slot fits in the model's length.

        Args:
            max_model_len: the longest stream the server allows, in tokens.
            max_positions: rotary positions that the model knows; `None`: it does not say.
            why_not: why the model's positions cannot fall back; `None`: they can.
        """
        policy = self
        if self.window is None and self.retention is None:
            room = max_model_len - self.max_sink
            if room < 1:
                raise PolicyError(
                    "max(sink, max_source_len)",
                    self.max_sink,
                    f"leaves no window within max_model_len={max_model_len}; lower the larger",
                )
            if max_positions is not None and max_model_len > max_positions and not why_not:
                # Positions must fall back, and need room to do so.
                room = min(room, max(1, max_positions // 2 - self.max_sink))
            policy = dataclasses.replace(self, window=min(DEFAULT_WINDOW, room))
        largest = policy.largest
        # A window that keeps one entry more still spans max_model_len entries at most.
        if largest.sink + largest.ring > max_model_len + (not policy.window_includes_step):
            raise PolicyError(
                "sink + window",
                largest.sink + largest.ring,
                f"is larger than max_model_len={max_model_len}; lower the window or the sink "
                "(max_source_len counts as sink)",
            )
        return policy._resolve_positions(max_positions, why_not)

    def _resolve_positions(self, max_positions: int | None, why_not: str | None) -> EnginePolicy:
        capacity = self.largest.capacity
        if max_positions is None:
            why_not = why_not or "it does not say how many positions it knows"
        elif capacity >= max_positions and why_not is None:
            why_not = (
                f"sink + window={capacity} leave none of its {max_positions} positions over; lower "
                "--bounded-kv-window"
            )
        positions = self.positions or (ABSOLUTE if why_not else REBASE)
        if positions == ABSOLUTE:
            if self.position_limit is not None:
                raise PolicyError(
                    "--bounded-kv-position-limit",
                    self.position_limit,
                    "has no effect with --bounded-kv-positions absolute"
                    + ("" if self.positions else f", which this model needs: {why_not}"),
                )
            return dataclasses.replace(self, positions=positions)
        if why_not:
            raise PolicyError(
                "--bounded-kv-positions",
                positions,
                f"not for this model: {why_not}, or use --bounded-kv-positions absolute",
            )
        assert max_positions is not None
        limit = self.position_limit
        if limit is None:
            limit = min(max_positions, LIMIT_IN_CAPACITIES * capacity)
        if not capacity < limit <= max_positions:
            raise PolicyError(
                "--bounded-kv-position-limit",
                limit,
                f"must be above sink + window={capacity} and at most the model's {max_positions} "
                "positions (max_position_embeddings)",
            )
        return dataclasses.replace(self, positions=positions, position_limit=limit)

    @cached_property
    def _by_source_len(self) -> tuple[StreamPolicy, ...]:
        """The callable's policies, for source lengths 0 to `max_source_len`."""
        function = _load_function(self.retention)
        return tuple(
            self._stream_policy_of(function(length), f"retention({length})")
            for length in range(self.max_source_len + 1)
        )

    @property
    def max_sink(self) -> int:
        """The largest sink any stream may have, in entries."""
        if self.retention is not None:
            return max(p.sink for p in self._by_source_len)
        return max(self.sink, self.max_source_len)

    @property
    def max_ring(self) -> int:
        """The largest ring any stream may have, in entries."""
        if self.retention is not None:
            return max(p.ring for p in self._by_source_len)
        assert self.window is not None, "resolve() first"
        return ring_capacity(self.window, self.window_includes_step)

    @property
    def spare(self) -> int:
        """Entries by which rings are longer than what queries see: see `StreamPolicy.spare`.

        A step of one token at `n` and `k` drafts overwrites entries up to `n + k - R`. The next
        query stands at `n + 1` at least, and so sees none before `n + 2 - R`.
        """
        return max(0, self.num_draft_tokens - 1)

    @cached_property
    def largest(self) -> StreamPolicy:
        """The largest stream that can be admitted: what slots are sized for."""
        if self.retention is not None:
            return max(self._by_source_len, key=lambda p: p.capacity)
        return StreamPolicy(self.max_sink, self.max_ring, self.spare)

    @cached_property
    def default(self) -> StreamPolicy:
        """What a request that says nothing gets."""
        return self.for_request({}, num_prompt_tokens=0)

    def for_request(
        self, args: Mapping[str, Any] | None, num_prompt_tokens: int | None
    ) -> StreamPolicy:
        """The policy of one request.

        Args:
            args: the request's extra arguments (`vllm_xargs`); keys that do not start with
                `kv_` belong to others and are ignored, as are vLLM's own.
            num_prompt_tokens: tokens of its prompt, which must contain the declared source;
                `None` where that is not known yet.

        Raises:
            PolicyError: for unknown `kv_` keys, wrong types and values beyond the start-up limits.
        """
        values = self._checked(args or {})
        source_len = values.get("kv_source_len", 0)
        if num_prompt_tokens is not None and source_len > num_prompt_tokens:
            raise PolicyError(
                "kv_source_len",
                source_len,
                f"is longer than the prompt, which has {num_prompt_tokens} tokens",
            )
        if self.retention is not None:
            return self._by_source_len[source_len]
        assert self.window is not None, "resolve() first"
        return StreamPolicy(
            sink=values.get("kv_sink", max(self.sink, source_len)),
            ring=ring_capacity(values.get("kv_window", self.window), self.window_includes_step),
            spare=self.spare,
        )

    def _stream_policy_of(self, policy: Any, field: str) -> StreamPolicy:
        if not isinstance(policy, SinkWindow):
            raise PolicyError(field, policy, "must return a SinkWindow")
        _require_int(f"{field}.sink", policy.sink, 0)
        _require_int(f"{field}.window", policy.window, 1)
        _require_bool(f"{field}.window_includes_step", policy.window_includes_step)
        ring = ring_capacity(policy.window, policy.window_includes_step)
        return StreamPolicy(policy.sink, ring, self.spare)

    def _checked(self, args: Mapping[str, Any]) -> dict[str, int]:
        given = {k: v for k, v in args.items() if k.startswith("kv_") and k not in VLLM_KEYS}
        limits = {
            "kv_source_len": (0, self.max_source_len, "max_source_len"),
            "kv_sink": (0, self.max_sink, "the largest sink, max(sink, max_source_len)"),
            "kv_window": (1, self.window or 0, "window"),
        }
        for key, value in given.items():
            if key == SOURCE_KEY:
                raise PolicyError(
                    key,
                    value,
                    "names are for requests to the HTTP server; here, begin the prompt with the "
                    "source's tokens and set kv_source_len",
                )
            if key not in limits:
                raise PolicyError(key, value, f"unknown argument; known: {', '.join(REQUEST_KEYS)}")
            if self.retention is not None and key != "kv_source_len":
                raise PolicyError(key, value, "is decided by the server's retention callable")
            minimum, maximum, name = limits[key]
            if _require_int(key, value, minimum) > maximum:
                raise PolicyError(key, value, f"is beyond this server's limit {maximum} ({name})")
        return given


VLLM_KEYS = frozenset({"kv_transfer_params", "kv_cache_report_mode"})
"""Extra arguments of vLLM's own that start with `kv_` (vllm/v1/request.py, 0.32.0)."""


def _load_function(path: str | None) -> Callable[[int], SinkWindow]:
    module_name, _, name = str(path).partition(":")
    if not module_name or not name:
        raise PolicyError("retention", path, "must be written module:function")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, TypeError) as error:
        raise PolicyError("retention", path, f"cannot be imported: {error}") from error
    if not callable(function):
        raise PolicyError("retention", path, "is not callable")
    return function  # type: ignore[no-any-return]
