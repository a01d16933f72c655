"""Slots: who gets one, who is refused and why, and that the sums add up."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_bounded_kv.config import (
    BoundedKVConfig,
    BoundedKVSpec,
    BoundedKVStep,
    SinkWindow,
    StreamPosition,
)
from vllm_bounded_kv.layout import ROW_INTS
from vllm_bounded_kv.manager import BoundedKVManager, Reason
from vllm_bounded_kv.step_plan import StepPlan

CONFIG = BoundedKVConfig(
    num_layers=2,
    num_heads=2,
    head_dim=4,
    rows_per_request=2,
    min_source_len=1,
    max_source_len=6,
    retention=SinkWindow(3, 5),
    max_slots=2,
)


@pytest.fixture
def manager() -> BoundedKVManager:
    return BoundedKVManager(CONFIG)


def step(*segments: tuple[str, int], **positions: tuple[int, int]) -> BoundedKVStep:
    return BoundedKVStep(
        segments, {name: StreamPosition(*where) for name, where in positions.items()}
    )


def reasons(manager: BoundedKVManager, what: BoundedKVStep) -> dict[str, Reason]:
    refusals = manager.admit(what)
    manager.check_integrity()
    return {refusal.request_id: refusal.reason for refusal in refusals}


def test_each_new_request_takes_a_slot_and_gives_it_back(manager: BoundedKVManager) -> None:
    assert manager.num_free_slots == 2
    assert not reasons(manager, step(("a", 1), ("b", 1), a=(1, 0), b=(2, 0)))
    assert manager.num_free_slots == 0
    assert {manager.slot_of("a"), manager.slot_of("b")} == {0, 1}
    assert manager.release("a")
    assert not manager.release("a")
    assert manager.slot_of("a") is None
    assert manager.num_free_slots == 1
    manager.check_integrity()


def test_refusals_name_the_reason_and_touch_nobody_else(manager: BoundedKVManager) -> None:
    assert not manager.admit(step(("a", 4), a=(3, 0)))
    manager.commit(step(("a", 4), a=(3, 0)))
    refused = manager.admit(
        step(
            *(("nowhere", 1), ("short", 1), ("long", 1), ("ahead", 1), ("a", 1)),
            *(("b", 1), ("late", 1)),
            short=(0, 0),
            long=(7, 0),
            ahead=(3, 2),
            a=(3, 3),
            b=(1, 0),
            late=(1, 0),
        )
    )
    assert [(r.request_id, r.reason, r.can_retry) for r in refused] == [
        ("nowhere", Reason.NO_POSITION, False),
        ("short", Reason.SOURCE_LEN, False),
        ("long", Reason.SOURCE_LEN, False),
        ("ahead", Reason.WRITTEN, False),
        ("a", Reason.WRITTEN, False),
        ("late", Reason.NO_SLOT, True),
    ]
    messages = {r.request_id: r.message for r in refused}
    assert "[1, 6], got 7" in messages["long"]
    assert "what was committed, 4, got 3" in messages["a"]
    assert "what was committed, 0, got 2" in messages["ahead"]
    assert "all 2 slots (max_slots) are held" in messages["late"]
    assert manager.slot_of("b") is not None
    # `a` goes on from where it was, unharmed; `late` gets in once there is room.
    assert not manager.admit(step(("a", 1), a=(3, 4)))
    manager.release("b")
    assert not reasons(manager, step(("late", 1), late=(1, 0)))


def test_a_source_does_not_change_length_in_mid_stream(manager: BoundedKVManager) -> None:
    assert not manager.admit(step(("a", 1), a=(3, 0)))
    assert reasons(manager, step(("a", 1), a=(4, 0))) == {"a": Reason.SOURCE_LEN}
    manager.commit(step(("a", 1), a=(3, 0)))
    manager.reset("a")
    assert reasons(manager, step(("a", 1), a=(4, 1))) == {"a": Reason.WRITTEN}
    slot = manager.slot_of("a")
    assert not manager.admit(step(("a", 1), a=(4, 0)))
    assert manager.slot_of("a") == slot


def test_committing_and_planning_twice_change_nothing(manager: BoundedKVManager) -> None:
    now = step(("a", 3), a=(2, 0))
    manager.admit(now)
    first = manager.plan(now).host.copy()
    manager.commit(now)
    manager.commit(now)
    assert np.array_equal(manager.plan(now).host, first)
    assert not manager.admit(step(("a", 1), a=(2, 3)))


def test_a_step_is_planned_before_the_last_one_is_committed(manager: BoundedKVManager) -> None:
    now, then = step(("a", 3), a=(2, 0)), step(("a", 2), a=(2, 3))
    manager.admit(now)
    manager.plan(now)
    ahead = manager.plan(then).host.copy()
    manager.commit(now)
    assert np.array_equal(manager.plan(then).host, ahead)


def test_a_late_commit_of_an_older_step_changes_nothing(manager: BoundedKVManager) -> None:
    first, second = step(("a", 3), a=(2, 0)), step(("a", 2), a=(2, 3))
    manager.admit(first)
    for now in (first, second, first):
        manager.commit(now)
    assert not manager.admit(step(("a", 1), a=(2, 5)))


@pytest.mark.parametrize("wrong", [(2, 4), (2, 2), (3, 3)])
def test_a_commit_that_does_not_go_on_counts_nothing(
    manager: BoundedKVManager, wrong: tuple[int, int]
) -> None:
    """As of a step that was refused: a gap, an overlap, another source."""
    now = step(("a", 3), ("b", 1), a=(2, 0), b=(2, 0))
    manager.admit(now)
    manager.commit(now)
    with pytest.raises(ValueError, match=r"'a': .* source_len 2 and written 3, got"):
        manager.commit(step(("b", 1), ("a", 2), a=wrong, b=(2, 1)))
    assert not manager.admit(step(("a", 1), ("b", 1), a=(2, 3), b=(2, 1)))


def test_a_commit_from_before_a_reset_is_passed_over(manager: BoundedKVManager) -> None:
    now = step(("a", 3), a=(2, 0))
    manager.admit(now)
    manager.reset("a")
    manager.commit(now)
    assert not manager.admit(step(("a", 1), a=(4, 0)))


def test_ints_of_few_bits_do_not_overflow(manager: BoundedKVManager) -> None:
    where = StreamPosition(np.int8(2), np.int8(0))  # type: ignore[arg-type]
    now = BoundedKVStep([("a", np.int8(127))], {"a": where})  # type: ignore[list-item]
    manager.admit(now)
    manager.plan(now)
    manager.commit(now)
    assert not manager.admit(step(("a", 1), a=(2, 127)))
    for position, field in (((1, 2**63), "written"), ((1, 0, 2**31), "source")):
        with pytest.raises(ValueError, match=f"{field} must be at most"):
            StreamPosition(*position)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_span_longer_than_the_step_is_refused(window: int, reverse: bool) -> None:
    """Where nothing of the step is stored, too."""
    retention = SinkWindow(1, window)
    manager = BoundedKVManager(replace(CONFIG, retention=retention, reverse_step_order=reverse))
    now = step(("a", 3), a=(2, 0))
    manager.admit(now)
    plan = manager.plan(now)
    q = torch.zeros(2, 2, 2, 4)
    with pytest.raises(ValueError, match="at most T = 2 tokens a row, got 3"):
        manager.attend(0, q, q, q, plan=plan)
    nothing = torch.zeros(2, 2, 0, 4)
    with pytest.raises(ValueError, match="T of at least 1 token"):
        manager.attend(0, nothing, nothing, nothing, plan=plan)


def test_out_has_memory_of_its_own(manager: BoundedKVManager) -> None:
    now = step(("a", 1), a=(2, 0))
    manager.admit(now)
    plan = manager.plan(now)
    both = torch.zeros(2, 2, 2, 1, 4)
    q = both[0]
    sources = torch.zeros(1, 2, 2, 6, 8)
    with pytest.raises(ValueError, match="own: it overlaps q"):
        manager.attend(0, q, q.clone(), q.clone(), sources, plan=plan, out=q.view(2, 1, 2, 4))
    out = both[1].view(2, 1, 2, 4)
    assert manager.attend(0, q, q, q, sources, plan=plan, out=out) is out


def test_what_is_released_meanwhile_is_passed_over_by_commit(manager: BoundedKVManager) -> None:
    now = step(("a", 3), ("b", 1), a=(2, 0), b=(2, 0))
    manager.admit(now)
    manager.release("a")
    manager.commit(now)
    assert not manager.admit(step(("b", 1), b=(2, 1)))
    assert not manager.admit(step(("a", 1), a=(2, 0)))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (step(("a", 1), ("x", 1), a=(2, 0), x=(2, 0)), "'x' holds no slot: admit it"),
        (step(("a", 1)), "'a': the step declares no position"),
        (step(("a", 1), a=(7, 0)), r"\[1, 6\], got \[7\]"),
        (step(("a", 1), a=(0, 0)), r"\[1, 6\], got \[0\]"),
    ],
)
def test_what_cannot_be_planned(
    manager: BoundedKVManager, what: BoundedKVStep, message: str
) -> None:
    manager.admit(step(("a", 1), a=(2, 0)))
    with pytest.raises(ValueError, match=message):
        manager.plan(what)


def test_other_misuse_is_refused(manager: BoundedKVManager) -> None:
    q = torch.zeros(2, 2, 1, 4)
    with pytest.raises(ValueError, match="no step has been planned"):
        manager.attend(0, q, q, q)
    now = step(("a", 1), a=(2, 0))
    manager.admit(now)
    manager.plan(now)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=rf"layer must be in \[0, 2\), got {layer}"):
            manager.attend(layer, q, q, q)
    with pytest.raises(ValueError, match="'x' holds no slot"):
        manager.reset("x")
    with pytest.raises(ValueError, match="'a': the step declares no position"):
        manager.commit(step(("a", 1)))
    both = step(("a", 1), ("b", 1), a=(2, 0), b=(2, 0))
    manager.admit(both)
    with pytest.raises(ValueError, match="2 segments, more than the plan's 1 rows"):
        manager.plan(both, into=StepPlan(1))


def test_a_plan_is_filled_in_place_and_padded(manager: BoundedKVManager) -> None:
    plan = StepPlan(4)
    address = plan.table.data_ptr()
    both, one = step(("a", 3), ("b", 1), a=(2, 0), b=(1, 0)), step(("b", 2), b=(1, 1))
    manager.admit(both)
    for now in (both, one, both):
        assert manager.plan(now, into=plan) is plan
        assert plan.table.data_ptr() == address
        assert plan.table.shape == (4, ROW_INTS) and plan.table.dtype == torch.int32
        alone = manager.plan(now).host
        assert np.array_equal(plan.host[: len(alone)], alone)
        assert not plan.host[len(alone) :].any()
        assert np.array_equal(plan.table.numpy(), plan.host)


def test_a_plan_of_no_rows_is_a_plan(manager: BoundedKVManager) -> None:
    """And not a reason to take the last one."""
    now = step(("a", 1), a=(2, 0))
    manager.admit(now)
    plan = manager.plan(now)
    nothing, q = torch.zeros(0, 2, 1, 4), torch.zeros(2, 2, 1, 4)
    assert manager.attend(0, nothing, nothing, nothing, plan=plan.select([])).shape[0] == 0
    with pytest.raises(ValueError, match="= 0 rows, got 2"):
        manager.attend(0, q, q, q, plan=StepPlan(0))


def test_select_serves_part_of_a_batch(manager: BoundedKVManager) -> None:
    both = step(("a", 3), ("b", 1), a=(2, 0), b=(1, 0))
    manager.admit(both)
    plan = manager.plan(both)
    for rows in ([1], [0], [1, 0], []):
        chosen = plan.select(rows)
        assert np.array_equal(chosen.host, plan.host[rows])
        assert chosen.spans.tolist() == [[3, 1][row] for row in rows]
    for rows in ([2], [-1]):
        with pytest.raises(IndexError, match=r"rows must be in \[0, 2\), got"):
            plan.select(rows)
    with pytest.raises(ValueError, match=r"name each segment once, got \[1, 1\]"):
        plan.select([1, 1])
    for mask in ([True, False], [[0]], [0.0]):
        with pytest.raises(ValueError, match="rows must be ints"):
            plan.select(mask)  # type: ignore[arg-type]


def test_the_pool_is_one_tensor_of_the_size_that_was_announced() -> None:
    spec = BoundedKVSpec(replace(CONFIG, dtype=None))
    with pytest.raises(ValueError, match="dtype must be"):
        BoundedKVManager.memory_bytes(spec)
    with pytest.raises(ValueError, match="dtype must be"):
        spec.resource_class.build(spec, "cpu")
    spec.apply_yaml_overrides(max_slots=7)
    manager = spec.resource_class.build(spec, "cpu", torch.bfloat16)
    assert isinstance(manager, BoundedKVManager)
    assert manager.slots.dtype == torch.bfloat16
    assert manager.slots.shape == (2, 7, 2, 2, CONFIG.slot_tokens, 8)
    assert manager.slots[1].is_contiguous()
    assert manager.slots.nbytes == BoundedKVManager.memory_bytes(spec, torch.bfloat16)
    # What the model says goes before what the engine offers.
    fixed = BoundedKVManager.build(BoundedKVSpec(CONFIG), "cpu", torch.bfloat16)
    assert fixed.slots.dtype == torch.float32


@pytest.mark.parametrize("spoil", ["_free", "_holders"])
def test_control_integrity_notices(manager: BoundedKVManager, spoil: str) -> None:
    manager.admit(step(("a", 1), a=(1, 0)))
    state: Any = getattr(manager, spoil)
    if spoil == "_free":
        state.append(0)
    else:
        state["b"] = state["a"]
    with pytest.raises(AssertionError, match="slots"):
        manager.check_integrity()


def test_admission_from_many_threads() -> None:
    manager = BoundedKVManager(replace(CONFIG, max_slots=5))
    held: set[int] = set()
    lock, errors = threading.Lock(), []

    def work(name: str) -> None:
        for _ in range(300):
            now = step((name, 1), **{name: (1, 0)})
            if manager.admit(now):
                continue
            slot = manager.slot_of(name)
            with lock:
                if slot is None or slot in held:
                    errors.append(slot)
                held.add(slot or 0)
            manager.plan(now)
            manager.commit(now)
            with lock:
                held.discard(slot or 0)
            manager.release(name)

    threads = [threading.Thread(target=work, args=(f"r{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    manager.check_integrity()
    assert manager.num_free_slots == 5
