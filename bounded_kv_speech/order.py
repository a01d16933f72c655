"""Keeps an utterance's phones in order: of all echoes, only the next one can be sampled.

So no phone is skipped or said twice, and an utterance ends when it has run out of them. `Order` is
the bookkeeping, in arrays over a batch's rows; `PhoneOrder` is the logits processor that vLLM loads
(`--logits-processors bounded_kv_speech.order:PhoneOrder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from bounded_kv_speech.durations import LONGEST, longest
from bounded_kv_speech.tokens import END, FIRST_CODE, SPEECH, TEXT

_SPARE_PHONES = 256
_NOTHING: list[int] = [-1]


class Order:
    """Where each row of a batch is in what it is to say. Rows that say nothing are let be."""

    def __init__(self, num_rows: int) -> None:
        """For at most `num_rows` rows."""
        self.speaks = np.zeros(num_rows, bool)
        self.echoed = np.zeros(num_rows, np.int64)
        self.held = np.zeros(num_rows, np.int64)
        self._phones = np.full((num_rows, _SPARE_PHONES), END)
        self._longest = np.full((num_rows, _SPARE_PHONES), LONGEST)
        """Codes at most when so many phones have been echoed."""
        self._seen = np.zeros(num_rows, np.int64)
        self._outputs = [_NOTHING] * num_rows

    def begin(self, row: int, prompt: Sequence[int] | None, outputs: list[int]) -> None:
        """A row's prompt, and the list that its tokens are appended to (-1: not known yet)."""
        found = _last_utterance(prompt or ())
        self.end(row)
        if found is None:
            return
        phones, said = found
        if len(phones) >= self._phones.shape[1]:
            more = len(phones) + _SPARE_PHONES - self._phones.shape[1]
            self._phones = np.pad(self._phones, ((0, 0), (0, more)), constant_values=END)
            self._longest = np.pad(self._longest, ((0, 0), (0, more)), constant_values=LONGEST)
        self._phones[row] = END
        self._phones[row, : len(phones)] = phones
        self._longest[row, : len(phones) + 1] = longest(phones)
        self.speaks[row], self._outputs[row] = True, outputs
        self._read(row, said)

    def end(self, row: int) -> None:
        """The row's request has left."""
        self.speaks[row], self._outputs[row] = False, _NOTHING
        self.echoed[row] = self.held[row] = self._seen[row] = 0

    def move(self, source: int, target: int, swap: bool) -> None:
        """The row `source` becomes `target`, and the other way round with `swap`."""
        pair, other = [source, target], [target, source]
        arrays = (self.speaks, self.echoed, self.held, self._phones, self._longest, self._seen)
        for each in arrays:
            each[other] = each[pair]
        outputs = self._outputs
        outputs[source], outputs[target] = outputs[target], outputs[source]
        if not swap:
            self.end(source)

    def advance(self, num_rows: int) -> None:
        """Read what was sampled since the last time."""
        outputs = self._outputs[:num_rows]
        known = np.fromiter(map(len, outputs), np.int64, num_rows)
        new = np.where(self.speaks[:num_rows], known - self._seen[:num_rows], 0)
        for row in np.flatnonzero(new > 1):  # a request that is taken up again
            self._read(row, outputs[row][self._seen[row] : -1])
            self._seen[row] = known[row] - 1
        (rows,) = np.nonzero(new > 0)
        last = np.fromiter(map(itemgetter(-1), map(outputs.__getitem__, rows)), np.int64, len(rows))
        rows, last = rows[last >= 0], last[last >= 0]
        self._seen[rows] += 1
        code = last >= FIRST_CODE
        self.echoed[rows] += ~code
        self.held[rows] = np.where(code, self.held[rows] + 1, 0)

    def next_tokens(self, rows: np.ndarray) -> np.ndarray:
        """The one token that may follow besides codes: the next phone, or `END`."""
        return np.asarray(self._phones[rows, self._at(rows)])

    def may_go_on(self, rows: np.ndarray) -> np.ndarray:
        """Whether that token may follow now: a phone has a code, the silence before none."""
        return np.asarray((self.held[rows] > 0) | (self.echoed[rows] == 0))

    def must_go_on(self, rows: np.ndarray) -> np.ndarray:
        """Whether nothing else may."""
        return np.asarray(self.held[rows] >= self._longest[rows, self._at(rows)])

    def _at(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(np.minimum(self.echoed[rows], self._phones.shape[1] - 1))

    def _read(self, row: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            code = token >= FIRST_CODE
            self.echoed[row] += not code
            self.held[row] = self.held[row] + 1 if code else 0


class PhoneOrder(LogitsProcessor):
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """As vLLM makes it."""
        self._order = Order(vllm_config.scheduler_config.max_num_seqs)
        self._device = device

    def is_argmax_invariant(self) -> bool:
        """Greedy requests are held to the order too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Requests that came, left or changed their rows."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._order.end(row)
        for row, _, prompt, outputs in batch_update.added:
            self._order.begin(row, prompt, outputs)
        for source, target, direction in batch_update.moved:
            self._order.move(source, target, direction == MoveDirectionality.SWAP)

    def apply(self, logits: Tensor) -> Tensor:
        """`logits [rows, vocabulary]`, in place."""
        self._order.advance(len(logits))
        (rows,) = np.nonzero(self._order.speaks[: len(logits)])
        if not len(rows):
            return logits
        at, following = self._on_device(rows), self._on_device(self._order.next_tokens(rows))
        barred = self._on_device(~self._order.may_go_on(rows))
        score = logits[at, following].masked_fill(barred, -torch.inf)
        logits[at, :FIRST_CODE] = -torch.inf
        logits[at, following] = score
        logits[self._on_device(rows[self._order.must_go_on(rows)]), FIRST_CODE:] = -torch.inf
        return logits

    def _on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _last_utterance(prompt: Sequence[int]) -> tuple[Sequence[int], Sequence[int]] | None:
    """Phones of a prompt's last utterance, and what it has of the sound; None where there is none.

    A search from the end: a stream's prompt is all that it has said.
    """
    speech = _last(prompt, SPEECH, len(prompt))
    text = _last(prompt, TEXT, speech)
    if text < 0:
        return None
    return prompt[text + 1 : speech], prompt[speech + 1 :]


def _last(tokens: Sequence[int], wanted: int, before: int) -> int:
    return next((i for i in range(before - 1, -1, -1) if tokens[i] == wanted), -1)
