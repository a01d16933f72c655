"""The logits processor of the embedded voice: phones in order, each once, and then the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from bounded_kv_speech.durations import longest
from bounded_kv_speech.order import PhoneOrder
from bounded_kv_speech.tokens import (
    END,
    FIRST_CODE,
    FIRST_PHONE,
    SPEECH,
    TEXT,
    VOCAB_SIZE,
    VOICE,
    to_phones,
)

A, B, C = FIRST_PHONE, FIRST_PHONE + 1, FIRST_PHONE + 2
CODE = FIRST_CODE + 11
PARAMS = SamplingParams()


def processor(num_rows: int = 4) -> PhoneOrder:
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=num_rows))
    return PhoneOrder(config, torch.device("cpu"), False)


def update(
    size: int,
    *added: tuple[int, list[int], list[int]],
    removed: tuple[int, ...] = (),
    moved: tuple[tuple[int, int, MoveDirectionality], ...] = (),
) -> BatchUpdate:
    return BatchUpdate(
        batch_size=size,
        removed=removed,
        added=[(row, PARAMS, prompt, outputs) for row, prompt, outputs in added],
        moved=moved,
    )


def allowed(order: PhoneOrder, num_rows: int) -> list[tuple[set[int], bool]]:
    """Of each row: tokens that may follow besides codes, and whether codes may."""
    logits = order.apply(torch.zeros(num_rows, VOCAB_SIZE))
    finite = torch.isfinite(logits)
    found = []
    for row in finite:
        codes = row[FIRST_CODE:]
        assert codes.all() or not codes.any()
        found.append((set(row[:FIRST_CODE].nonzero().flatten().tolist()), bool(codes.all())))
    return found


def utterance(*phones: int) -> list[int]:
    return [VOICE, CODE, TEXT, *phones, SPEECH]


def test_phones_follow_each_other_and_then_the_end() -> None:
    order, outputs = processor(), []
    order.update_state(update(1, (0, utterance(A, B, A), outputs)))
    followed = [allowed(order, 1)[0]]
    for token in (CODE, A, CODE, CODE, B, CODE, A, CODE):
        outputs.append(token)
        order.update_state(None)
        followed.append(allowed(order, 1)[0])
    assert followed == [
        ({A}, True),  # silence, or at once the first phone
        ({A}, True),
        (set(), True),  # a phone has a code
        ({B}, True),
        ({B}, True),
        (set(), True),
        ({A}, True),
        (set(), True),
        ({END}, True),
    ]


@pytest.mark.parametrize("at", range(5))
def test_a_phone_lasts_only_so_long(at: int) -> None:
    """As do the silence before the first, and the last, which a pause follows."""
    phones = [*to_phones("ə\u02c8i ."), END]
    most = longest(phones[:-1])
    assert most.tolist() == [6, 8, 12, 5, 10]
    order, outputs = processor(), []
    order.update_state(update(1, (0, utterance(*phones[:-1]), outputs)))
    for phone in phones[:at]:
        outputs += [CODE, phone]
    if at:
        outputs.pop(0)
    for _ in range(most[at] - 1):
        outputs.append(CODE)
        assert allowed(order, 1)[0][1]
    outputs.append(CODE)
    assert allowed(order, 1) == [({phones[at]}, False)]


def test_what_a_pause_follows_is_drawn_out() -> None:
    assert longest(to_phones("b\u02c8i.")).tolist() == [6, 8, 24, 10]
    assert longest(to_phones("b, b\u02c8i")).tolist() == [6, 18, 7, 5, 8, 24]
    assert longest([]).tolist() == [6]


def test_a_request_taken_up_again_goes_on_where_it_was() -> None:
    """After a preemption all its tokens come at once; the last may not be known yet."""
    order, outputs = processor(), [A, CODE, B, CODE, -1]
    order.update_state(update(1, (0, utterance(A, B, C), outputs)))
    assert allowed(order, 1) == [({C}, True)]
    outputs[-1:] = [CODE, C]
    assert allowed(order, 1) == [(set(), True)]


def test_a_prompt_may_hold_earlier_utterances_and_some_sound() -> None:
    prompt = [*utterance(A, B), A, CODE, B, CODE, TEXT, C, A, SPEECH, CODE, C, CODE]
    order = processor()
    order.update_state(update(1, (0, prompt, [])))
    assert allowed(order, 1) == [({A}, True)]


def test_rows_move_leave_and_are_taken_by_others() -> None:
    order = processor()
    first, second, third = [A, CODE], [A], [B, CODE, CODE]
    order.update_state(
        update(
            3,
            (0, utterance(A, B), first),
            (1, utterance(A, C), second),
            (2, utterance(B, C), third),
        )
    )
    expected = [({B}, True), (set(), True), ({C}, True)]
    assert allowed(order, 3) == expected
    order.update_state(update(3, moved=((0, 1, MoveDirectionality.SWAP),)))
    assert allowed(order, 3) == [expected[1], expected[0], expected[2]]
    order.update_state(update(2, removed=(0,), moved=((2, 0, MoveDirectionality.UNIDIRECTIONAL),)))
    assert allowed(order, 2) == [expected[2], expected[0]]
    third.append(C)
    assert allowed(order, 2) == [(set(), True), expected[0]]
    order.update_state(update(3, (2, utterance(C), [])))
    assert allowed(order, 3)[2] == ({C}, True)


@pytest.mark.parametrize("prompt", [[], [VOICE, CODE], [TEXT, A], [SPEECH, CODE]], ids=str)
def test_what_is_no_utterance_is_let_be(prompt: list[int]) -> None:
    order = processor()
    order.update_state(update(2, (0, prompt, [A]), (1, utterance(A), [])))
    logits = torch.randn(2, VOCAB_SIZE)
    before = logits.clone()
    order.apply(logits)
    assert torch.equal(logits[0], before[0])
    assert not torch.equal(logits[1], before[1])


def test_an_utterance_may_be_longer_than_any_before() -> None:
    phones = np.random.default_rng(0).integers(FIRST_PHONE, FIRST_CODE, size=700).tolist()
    order, outputs = processor(), []
    order.update_state(update(1, (0, utterance(*phones), outputs)))
    for phone in phones:
        assert allowed(order, 1)[0][0] == {phone}
        outputs += [phone, CODE]
    assert allowed(order, 1) == [({END}, True)]
    outputs.append(END)  # the engine may be a step ahead
    assert allowed(order, 1) == [(set(), True)]


def test_the_scores_of_what_may_follow_are_left_as_they_are() -> None:
    order = processor()
    order.update_state(update(1, (0, utterance(A), [])))
    logits = torch.randn(1, VOCAB_SIZE)
    before = logits.clone()
    order.apply(logits)
    assert torch.equal(logits[0, FIRST_CODE:], before[0, FIRST_CODE:])
    assert logits[0, A] == before[0, A]
