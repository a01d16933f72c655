"""Attention over a slot pool, by one signature: a reference, and what runs on each device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vllm_bounded_kv.step_plan import StepPlan


class Attend(Protocol):
    """One layer of one step; changes `slots` in place, nothing else but `out`.

    Every read happens before any write. Row `b * rows + r` of the batch is row `r` of segment `b`.
    Scores and sums are computed in float32 at least; on GPUs, where all operands are of one half
    precision, the softmax weights are rounded to it before they meet the values. Keys and values
    are stored without arithmetic, so bit-exact when slots have their dtype. Only entries that the
    plan names are touched: garbage elsewhere, NaN included, has no effect. A row of zeros attends
    its own tokens.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        plan: StepPlan,
        *,
        sources: Tensor | None = None,
        row_sources: Tensor | None = None,
        query_window: int | None = None,
        reverse_step_order: bool = False,
        rel_bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend, then store.

        Args:
            q: `[B * rows, H, T, D]`, `H` a multiple of `H_kv`.
            k, v: `[B * rows, H_kv, T, D]`.
            slots: `[num_slots, rows, H_kv, slot_tokens, 2D]`, keys in the first half of the last
                axis and values in the second.
            plan: of `B` rows.
            sources: `[num_sources, rows, H_kv, L, 2D]`, shared prefixes, laid out as `slots`.
            row_sources: `[B, rows, H_kv, L, 2D]`, the prefixes of rows whose source is -1.
            query_window: `None`: every query sees all retained keys and all `T` of the step. Set:
                only keys at distances `[0, query_window]`, in tokens.
            reverse_step_order: whether a write's tokens count down from its offset.
            rel_bias: `[B * rows, H, T, m_max + 2T - 1]`, added to the scores before they are
                scaled; entry `distance + T - 1`, with distances in retained order.
            out: `[B * rows, T, H, D]` to write to, of memory that no input has; a new one if
                `None`.

        Returns:
            `[B * rows, T, H, D]`, in `q`'s dtype.

        Raises:
            ValueError: shapes do not fit each other or the plan, or a source that is read is
                missing. Nothing has been stored then.
        """
        ...


def attend_on(device: torch.device) -> Attend:
    """What runs on a kind of device.

    Raises:
        ValueError: nothing does.
    """
    if device.type == "cpu":
        from vllm_bounded_kv.attention import cpu

        return cpu.attend
    if device.type == "cuda":
        from vllm_bounded_kv.attention import triton

        return triton.attend
    raise ValueError(f"device must be a CPU or a CUDA GPU, got {device}")
