"""The embedded voice's vocabulary: phones, and the marks of codes."""

from __future__ import annotations

import numpy as np

from bounded_kv_speech.tokens import (
    FIRST_CODE,
    FIRST_PHONE,
    PHONES,
    SPEECH,
    VOICE,
    marks,
    phone_spans,
    to_phones,
)


def test_each_phone_has_a_token_below_the_codes() -> None:
    assert len(set(PHONES)) == len(PHONES) <= FIRST_CODE - FIRST_PHONE
    assert [to_phones(phone) for phone in PHONES] == [[FIRST_PHONE + i] for i in range(len(PHONES))]


def test_a_stress_is_of_its_vowel() -> None:
    spans = phone_spans("\u02c8\u025bl")
    assert [PHONES[token - FIRST_PHONE] for token, _ in spans] == ["\u02c8\u025b", "l"]
    assert [behind for _, behind in spans] == [2, 3]
    assert to_phones("\u02c8\u025bl\u0259")[1:] == to_phones("l\u0259")  # on one vowel only
    assert to_phones("\u02c8l") == to_phones("l")  # on a consonant it says nothing
    assert to_phones('"l"') == to_phones("l")


def test_marks_are_the_last_token_that_is_no_code() -> None:
    a, b, code = FIRST_PHONE, FIRST_PHONE + 1, FIRST_CODE
    found = marks([code, SPEECH, code, a, code, code + 9, b, code], VOICE)
    assert found.tolist() == [VOICE, SPEECH, SPEECH, a, a, a, b, b]
    assert marks(np.array([code, code]), b).tolist() == [b, b]
