"""The slot pool of a streaming decoder: admit, plan, attend, commit.

A request owns one slot from its admission to its release. Where it stands in its stream comes with
every step from the model, so a step can be planned before the one ahead of it is committed; only
`admit` compares. Nothing is cleared when a slot changes hands: an entry is read only where a
position says that it was written.

Admission and what else concerns requests may be called from any thread; `attend` from the one that
runs the model.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import numpy as np
import torch
from torch import Tensor

from vllm_bounded_kv.attention import Attend, attend_on
from vllm_bounded_kv.config import BoundedKVConfig, BoundedKVSpec, BoundedKVStep, StreamPosition
from vllm_bounded_kv.layout import ROW_INTS
from vllm_bounded_kv.rows import Ints, Policies, plan_rows
from vllm_bounded_kv.step_plan import StepPlan


class Reason(StrEnum):
    """Why a request was not admitted to a step."""

    NO_POSITION = "no_position"
    SOURCE_LEN = "source_len"
    WRITTEN = "written"
    NO_SLOT = "no_slot"
    """The only one that passes: try again once a request has been released."""


@dataclass(frozen=True)
class Refusal:
    """One request that a step cannot serve."""

    request_id: str
    reason: Reason
    message: str
    """Names the field, its value and the limit."""

    @property
    def can_retry(self) -> bool:
        """Whether the same step may be admitted later."""
        return self.reason is Reason.NO_SLOT


@dataclass
class _Holder:
    """A request that holds a slot."""

    slot: int
    source_len: int | None
    """`None` after a reset, until it is admitted again."""
    written: int = 0
    """Entries committed."""


class BoundedKVManager:
    """A pool of `config.max_slots` slots for every layer, in one tensor."""

    def __init__(self, config: BoundedKVConfig, device: torch.device | str = "cpu") -> None:
        """Allocate the pool.

        Args:
            config: with a `dtype`; see `build` where the engine chooses it.
            device: where the pool lives.

        Raises:
            ValueError: `config.dtype` is not settled.
        """
        dtype = _settled(config, None)
        self.config = config
        self.slots = torch.empty(_shape(config), dtype=dtype, device=device)
        """`[num_layers, max_slots, rows, H_kv, slot_tokens, 2D]`: a layer is contiguous."""
        self._policies = Policies.of(config)
        self._attend: Attend = attend_on(self.slots.device)
        self._lock = threading.Lock()
        self._holders: dict[str, _Holder] = {}
        self._free = list(range(config.max_slots - 1, -1, -1))
        self._last_plan: StepPlan | None = None

    @classmethod
    def build(
        cls,
        spec: BoundedKVSpec,
        device: torch.device | str = "cpu",
        kv_dtype: torch.dtype | None = None,
    ) -> BoundedKVManager:
        """The pool that a model declares.

        Args:
            spec: the model's.
            device: where the pool lives.
            kv_dtype: the engine's KV dtype, for a spec that leaves it open.

        Raises:
            ValueError: neither names a dtype.
        """
        return cls(spec.config.with_dtype(_settled(spec.config, kv_dtype)), device)

    @staticmethod
    def memory_bytes(spec: BoundedKVSpec, kv_dtype: torch.dtype | None = None) -> int:
        """Bytes that the pool of `spec` takes on its device, known before it is built.

        Raises:
            ValueError: neither `spec` nor `kv_dtype` names a dtype.
        """
        return prod(_shape(spec.config)) * _settled(spec.config, kv_dtype).itemsize

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody holds."""
        with self._lock:
            return len(self._free)

    def slot_of(self, request_id: str) -> int | None:
        """The slot that a request holds."""
        with self._lock:
            holder = self._holders.get(request_id)
        return None if holder is None else holder.slot

    def admit(self, step: BoundedKVStep) -> list[Refusal]:
        """Take a slot for each new request of a step, and check the others.

        A refused request changes nothing, for itself or for others.

        Returns:
            Those that the step must be run without; empty when it can be run as it is.
        """
        refusals = []
        with self._lock:
            for request_id, _ in step.segments:
                refusal = self._admit(request_id, step.positions.get(request_id))
                if refusal is not None:
                    refusals.append(Refusal(request_id, *refusal))
        return refusals

    def plan(self, step: BoundedKVStep, into: StepPlan | None = None) -> StepPlan:
        """Work out what each segment reads and writes; changes nothing in the pool.

        Args:
            step: of requests that are admitted.
            into: a plan to fill in place, its further rows with padding; a new one if `None`.

        Raises:
            ValueError: a segment's request holds no slot or has no position, its source length
                is not allowed, or `into` is too short.
        """
        rows = np.empty((len(step.segments), ROW_INTS), dtype=np.int32)
        segments = self._segments(step)
        plan_rows(self._policies, segments, rows)
        if into is None:
            into = StepPlan(len(rows), self.slots.device)
        into.fill(rows, segments[-1])
        self._last_plan = into
        return into

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sources: Tensor | None = None,
        row_sources: Tensor | None = None,
        plan: StepPlan | None = None,
        rel_bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend what the plan retains and the step's own tokens, then store those.

        Args:
            layer: of the model.
            q: `[B * rows, H, T, D]`, `H` a multiple of `H_kv`.
            k, v: `[B * rows, H_kv, T, D]`.
            sources: `[num_sources, rows, H_kv, L, 2D]`, keys in the first half of the last axis.
            row_sources: `[B, rows, H_kv, L, 2D]`, of requests whose position says `source=-1`.
            plan: of this step; the last one planned if `None`.
            rel_bias: `[B * rows, H, T, m_max + 2T - 1]`, added to the scores before scaling; entry
                `distance + T - 1`, with distances in retained order.
            out: `[B * rows, T, H, D]` to write to; a new one if `None`.

        Returns:
            `[B * rows, T, H, D]`, in `q`'s dtype.

        Raises:
            ValueError: shapes that do not fit each other or the plan; a source that is missing.
        """
        if plan is None:
            plan = self._last_plan
        if plan is None:
            raise ValueError("plan must be given: no step has been planned")
        if not 0 <= layer < self.config.num_layers:
            raise ValueError(f"layer must be in [0, {self.config.num_layers}), got {layer}")
        return self._attend(
            q,
            k,
            v,
            self.slots[layer],
            plan,
            sources=sources,
            row_sources=row_sources,
            query_window=self.config.query_window,
            reverse_step_order=self.config.reverse_step_order,
            rel_bias=rel_bias,
            out=out,
        )

    def commit(self, step: BoundedKVStep) -> None:
        """Count a step's tokens as written. Committing it twice changes nothing.

        Steps are committed in their order, however far ahead they were planned. A request that was
        released or reset since is passed over.

        Raises:
            ValueError: a segment's request has no position, or one that does not go on from what
                was committed. Nothing has been counted then.
        """
        with self._lock:
            counts = []
            for request_id, span in step.segments:
                position = _position_of(step, request_id)
                holder = self._holders.get(request_id)
                if holder is None or holder.source_len is None:
                    continue
                end = position.written + span
                goes_on = position.written == holder.written or end <= holder.written
                if position.source_len != holder.source_len or not goes_on:
                    raise ValueError(
                        f"request {request_id!r}: the step must go on from source_len "
                        f"{holder.source_len} and written {holder.written}, got "
                        f"{position.source_len} and {position.written}"
                    )
                counts.append((holder, end))
            for holder, end in counts:
                holder.written = max(holder.written, end)

    def reset(self, request_id: str) -> None:
        """Begin a request's stream anew, over any source, in the slot that it holds.

        Raises:
            ValueError: it holds none.
        """
        with self._lock:
            holder = self._holders.get(request_id)
            if holder is None:
                raise ValueError(f"request {request_id!r} holds no slot")
            holder.source_len, holder.written = None, 0

    def release(self, request_id: str) -> bool:
        """Give a request's slot back, whole, as it is.

        Returns:
            Whether it held one.
        """
        with self._lock:
            holder = self._holders.pop(request_id, None)
            if holder is not None:
                self._free.append(holder.slot)
        return holder is not None

    def check_integrity(self) -> None:
        """Check that every slot is free or held, once.

        Raises:
            AssertionError: with the sums that do not add up.
        """
        with self._lock:
            held = [holder.slot for holder in self._holders.values()]
            written = {name: holder.written for name, holder in self._holders.items()}
            free = list(self._free)
        max_slots = self.config.max_slots
        assert len(held) + len(free) == max_slots, (
            f"{len(held)} slots held + {len(free)} free != max_slots {max_slots}"
        )
        times = Counter(held + free)
        twice = [slot for slot in range(max_slots) if times[slot] != 1]
        assert not twice, f"slots held or free other than once: {twice}"
        behind = {name: count for name, count in written.items() if count < 0}
        assert not behind, f"requests with fewer than 0 entries written: {behind}"

    def _admit(self, request_id: str, position: StreamPosition | None) -> tuple[Reason, str] | None:
        if position is None:
            return Reason.NO_POSITION, f"request {request_id!r}: the step declares no position"
        holder = self._holders.get(request_id)
        source_len = position.source_len
        try:
            self.config.retention_for(source_len)
        except ValueError as error:
            return Reason.SOURCE_LEN, f"request {request_id!r}: {error}"
        if holder is not None and holder.source_len not in (None, source_len):
            return Reason.SOURCE_LEN, (
                f"request {request_id!r}: source_len must stay {holder.source_len} until it is "
                f"reset, got {source_len}"
            )
        written = 0 if holder is None else holder.written
        if position.written != written:
            return Reason.WRITTEN, (
                f"request {request_id!r}: written must be what was committed, {written}, "
                f"got {position.written}"
            )
        if holder is not None:
            holder.source_len = source_len
        elif self._free:
            self._holders[request_id] = _Holder(self._free.pop(), source_len)
        else:
            return Reason.NO_SLOT, (
                f"request {request_id!r}: all {self.config.max_slots} slots (max_slots) are held; "
                "release one first"
            )
        return None

    def _segments(self, step: BoundedKVStep) -> Ints:
        """`[5, B]` for `plan_rows`."""
        holders, positions = self._holders, step.positions
        try:
            with self._lock:
                values = [
                    (
                        holders[request_id].slot,
                        (at := positions[request_id]).source,
                        at.source_len,
                        at.written,
                        span,
                    )
                    for request_id, span in step.segments
                ]
        except KeyError:
            for request_id, _ in step.segments:
                _position_of(step, request_id)
                if request_id not in holders:
                    raise ValueError(f"request {request_id!r} holds no slot: admit it") from None
            raise
        segments = np.array(values, dtype=np.int64).reshape(-1, 5).T
        source_len = segments[2]
        low, high = self.config.min_source_len, self.config.max_source_len
        if ((source_len < low) | (source_len > high)).any():
            raise ValueError(
                f"source_len must be in [min_source_len, max_source_len] = [{low}, {high}], "
                f"got {source_len.tolist()}"
            )
        return segments


def _position_of(step: BoundedKVStep, request_id: str) -> StreamPosition:
    try:
        return step.positions[request_id]
    except KeyError:
        raise ValueError(f"request {request_id!r}: the step declares no position") from None


def _shape(config: BoundedKVConfig) -> Sequence[int]:
    return (
        config.num_layers,
        config.max_slots,
        config.rows_per_request,
        config.num_heads,
        config.slot_tokens,
        2 * config.head_dim,
    )


def _settled(config: BoundedKVConfig, kv_dtype: torch.dtype | None) -> torch.dtype:
    dtype = config.dtype or kv_dtype
    if dtype is None:
        raise ValueError("dtype must be a floating-point torch.dtype: give kv_dtype, got None")
    return dtype
