"""A planned step: one int32 row per segment, on the host and where the kernels run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_bounded_kv.layout import ROW_INTS, RowPlan

T = TypeVar("T")


class StepPlan:
    """`B` rows of `layout.ROW_INTS` ints. A row of zeros is padding: it reads and writes nothing.

    Its two buffers keep their addresses when it is filled again, so that a captured CUDA graph
    can be replayed for step after step.
    """

    host: NDArray[np.int32]
    """`[B, ROW_INTS]`. Change it through `fill` only."""
    table: torch.Tensor
    """`[B, ROW_INTS]` int32, the same on the device."""
    spans: NDArray[np.int64]
    """`[B]` tokens of the step that join each stream, as far as they are known; else 0."""

    def __init__(self, num_rows: int, device: torch.device | str = "cpu") -> None:
        self.table = torch.zeros(num_rows, ROW_INTS, dtype=torch.int32, device=device)
        on_host = self.table.device.type == "cpu"
        # On the CPU both are one memory.
        self.host = self.table.numpy() if on_host else np.zeros((num_rows, ROW_INTS), np.int32)
        self.spans = np.zeros(num_rows, np.int64)
        self._derived: dict[Hashable, object] = {}

    @classmethod
    def of(cls, rows: Sequence[RowPlan], device: torch.device | str = "cpu") -> StepPlan:
        """A plan of rows made one by one."""
        plan = cls(len(rows), device)
        plan.fill(np.array([row.as_ints() for row in rows], np.int32).reshape(-1, ROW_INTS))
        return plan

    def __len__(self) -> int:
        return len(self.host)

    def fill(self, rows: NDArray[np.int32], spans: NDArray[np.int64] | None = None) -> None:
        """Take over `rows` `[b <= B, ROW_INTS]` and `spans` `[b]`; what is left becomes padding.
        In place.

        Raises:
            ValueError: more rows than the plan has.
        """
        if len(rows) > len(self.host):
            raise ValueError(
                f"the step has {len(rows)} segments, more than the plan's {len(self.host)} rows"
            )
        self.host[: len(rows)] = rows
        self.host[len(rows) :] = 0
        self.spans[:] = 0
        if spans is not None:
            self.spans[: len(rows)] = spans
        self._derived.clear()
        if self.table.device.type != "cpu":
            # A pinned copy of its own: the next fill may come before this transfer has ended.
            staged = torch.from_numpy(self.host).pin_memory()
            self.table.copy_(staged, non_blocking=True)

    def select(self, rows: Sequence[int]) -> StepPlan:
        """The plan of a forward that runs some segments of the batch, by their index, in order.

        Raises:
            IndexError: an index is not that of a row.
            ValueError: what is given is not one index for each segment, each once: twice the same,
                both would write the same entries.
        """
        indices = np.asarray(rows)
        if not indices.size:
            indices = indices.astype(np.intp)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ValueError(f"rows must be ints, got {rows!r}")
        if ((indices < 0) | (indices >= len(self))).any():
            raise IndexError(f"rows must be in [0, {len(self)}), got {indices.tolist()}")
        if len(np.unique(indices)) != len(indices):
            raise ValueError(f"rows must name each segment once, got {indices.tolist()}")
        plan = StepPlan(len(indices), self.table.device)
        plan.fill(self.host[indices], self.spans[indices])
        return plan

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """What a kernel works out from the rows once for all layers of the step."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]  # type: ignore[return-value]
