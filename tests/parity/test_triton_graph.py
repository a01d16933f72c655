"""A step's values reach the kernels through the plan's table alone: so a captured graph serves all.

Without a GPU, what is launched for two steps of the same shapes is compared; with one, a graph is
captured and replayed against eager calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.interpreted_triton import DEVICE
from vllm_bounded_kv.attention import reference, triton
from vllm_bounded_kv.config import BoundedKVConfig, BoundedKVStep, SinkWindow, StreamPosition
from vllm_bounded_kv.manager import BoundedKVManager
from vllm_bounded_kv.step_plan import StepPlan

CONFIG = BoundedKVConfig(
    num_layers=1,
    num_heads=2,
    head_dim=32,
    rows_per_request=1,
    max_source_len=6,
    retention=SinkWindow(8, 20),
    max_slots=4,
)
NUM_TOKENS = 3
MOST_SEGMENTS = 3


class Streams:
    """A few requests, in buffers that keep their addresses."""

    def __init__(self) -> None:
        self.manager = BoundedKVManager(CONFIG, DEVICE)
        self.manager.slots.fill_(torch.nan)
        self.random = torch.Generator().manual_seed(0)
        self.plan = StepPlan(MOST_SEGMENTS, DEVICE)
        self.q = torch.zeros(MOST_SEGMENTS, 4, NUM_TOKENS, 32, device=DEVICE)
        self.k = torch.zeros(MOST_SEGMENTS, 2, NUM_TOKENS, 32, device=DEVICE)
        self.v = torch.zeros_like(self.k)
        self.out = torch.zeros(MOST_SEGMENTS, NUM_TOKENS, 4, 32, device=DEVICE)
        self.sources = torch.randn(2, 1, 2, 6, 64, generator=self.random).to(DEVICE)
        self.written = {"a": 0, "b": 0, "c": 0}

    def load(self, **spans: int) -> BoundedKVStep:
        """Plan a step of some requests and draw its tokens."""
        positions = {
            name: StreamPosition((ord(name) - ord("a")) * 3, self.written[name], ord(name) % 2)
            for name in spans
        }
        step = BoundedKVStep(list(spans.items()), positions)
        assert not self.manager.admit(step)
        self.manager.plan(step, into=self.plan)
        for tensor in (self.q, self.k, self.v):
            tensor.copy_(torch.randn(tensor.shape, generator=self.random))
        return step

    def commit(self, step: BoundedKVStep) -> None:
        self.manager.commit(step)
        for name, span in step.segments:
            self.written[name] += span

    def attend(self, slots: Tensor, attend: Any, out: Tensor | None) -> Tensor:
        result: Tensor = attend(
            self.q, self.k, self.v, slots, self.plan, sources=self.sources, out=out
        )
        return result


STEPS = [{"a": 3}, {"a": 3, "b": 2, "c": 0}, {"c": 3, "b": 1}, {"b": 0}, *[{"a": 3, "b": 3}] * 9]


@pytest.mark.parametrize("programs", [1, 64], ids=["whole", "split"])
def test_launches_do_not_depend_on_a_steps_values(
    monkeypatch: pytest.MonkeyPatch, programs: int
) -> None:
    monkeypatch.setattr(triton, "programs_wanted", lambda device: programs)
    monkeypatch.setattr(triton, "MAX_KEYS", 16)
    launched: list[tuple[Any, ...]] = []

    def note(launch: triton.Launch) -> None:
        args = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in launch.args]
        launched.append((launch.kernel, launch.grid, args, launch.meta))

    monkeypatch.setattr(triton.Launch, "run", note)
    streams, seen = Streams(), []
    for spans in STEPS:
        step = streams.load(**spans)
        streams.attend(streams.manager.slots[0], triton.attend, streams.out)
        streams.commit(step)
        seen.append(list(launched))
        launched.clear()
    assert len(seen[0]) == (2 if programs == 1 else 3)
    assert all(launches == seen[0] for launches in seen)


def test_nothing_but_the_result_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is made on the way, nor read back."""
    monkeypatch.setattr(triton.Launch, "run", lambda launch: None)
    monkeypatch.setattr(triton, "programs_wanted", lambda device: 64)
    streams = Streams()
    streams.load(a=3)
    slots = streams.manager.slots[0]
    triton.workspace(streams.q.device)

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"{func} was called")

    with Refuse():
        streams.attend(slots, triton.attend, streams.out)
    with Refuse(), pytest.raises(AssertionError, match="aten"):  # control
        streams.attend(slots, triton.attend, None)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("programs", [1, 64], ids=["whole", "split"])
def test_a_captured_graph_replays_every_step(
    monkeypatch: pytest.MonkeyPatch, programs: int
) -> None:
    """Not run by this project's CI, which has no GPU."""
    monkeypatch.setattr(triton, "programs_wanted", lambda device: programs)
    streams = Streams()
    slots = streams.manager.slots[0]
    streams.load()  # padding only: compiles the kernels, stores nothing
    streams.attend(slots, triton.attend, streams.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        streams.attend(slots, triton.attend, streams.out)
    for spans in STEPS:
        step = streams.load(**spans)
        eager_slots, judged_slots = slots.clone(), slots.clone()
        eager = streams.attend(eager_slots, triton.attend, None)
        judged = streams.attend(judged_slots, reference.attend, None)
        graph.replay()
        streams.commit(step)
        assert torch.equal(streams.out, eager)
        assert (eager - judged).abs().max() <= 5e-6
        for wanted in (eager_slots, judged_slots):
            assert torch.equal(slots.view(torch.uint8), wanted.view(torch.uint8))
