"""Text to utterances: every sound of it once, in order, in parts that fit the model's window."""

from __future__ import annotations

from itertools import chain

import pytest

from bounded_kv_speech.front_end import LONGEST, FrontEnd, cut
from bounded_kv_speech.tokens import PHONES, SPEECH, TEXT, to_phones


@pytest.fixture(scope="module")
def front_end() -> FrontEnd:
    return FrontEnd()


def test_a_sentence_is_an_utterance(front_end: FrontEnd) -> None:
    found = front_end.utterances("The cat sat. Did it? Yes!")
    assert len(found) == 3
    for tokens, mark in zip(found, ".?!", strict=True):
        assert (tokens[0], tokens[-1]) == (TEXT, SPEECH)
        assert tokens[-2] == to_phones(mark)[0]
    assert found[0][1:3] == to_phones("\u00f0\u0259")


@pytest.mark.parametrize("text", ["", "  \n ", "...", "\u2014 \u2014", "\U0001f600"])
def test_what_has_no_sound_is_no_utterance(front_end: FrontEnd, text: str) -> None:
    assert front_end.utterances(text) == []


def test_a_long_sentence_is_cut_between_clauses_or_words(front_end: FrontEnd) -> None:
    text = " and then, ".join(["a sentence which goes on with no end in sight"] * 12)
    parts = [tokens[1:-1] for tokens in front_end.utterances(text)]
    assert len(parts) > 5
    assert all(len(part) <= LONGEST for part in parts)
    (whole,) = (to_phones(phonemes) for phonemes in front_end.phonemize(text)[:1])
    assert list(chain(*parts))[: len(whole)] == whole
    ends = {part[-1] for part in parts[:-1]}
    assert ends <= set(to_phones(", "))


def test_without_a_place_to_cut_it_is_cut_anyway() -> None:
    phones = to_phones(PHONES[-1]) * (2 * LONGEST + 5)
    assert [len(part) for part in cut(phones)] == [LONGEST, LONGEST, 5]
    assert cut([]) == []


def test_parts_are_about_as_long_as_each_other() -> None:
    word, space, comma = (to_phones(letter)[0] for letter in "t ,")
    words = [word, word, word, space] * (LONGEST // 4 + 1)
    assert abs(len(cut(words)[0]) - len(words) / 2) <= 2
    with_comma = [*words[:24], comma, *words[24:]]
    assert len(cut(with_comma)[0]) == 25  # a clause ends well before the middle
