"""Text in pieces, cut into sentences."""

from __future__ import annotations

import random

import pytest

from bounded_kv_server.sentences import Sentences

TEXT = 'It is 3.5 miles to St. Ives. "Is it?" he said... Yes! No end'
SENTENCES = ["It is 3.5 miles to St. Ives.", '"Is it?"', "he said...", "Yes!"]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_do_not_matter(seed: int) -> None:
    rng, sentences, found, at = random.Random(seed), Sentences(1000), [], 0
    while at < len(TEXT):
        size = rng.randint(1, 9)
        found += sentences.add(TEXT[at : at + size])
        at += size
    assert found == SENTENCES
    assert sentences.flush() == ["No end"]
    assert sentences.flush() == []


def test_a_sentence_comes_as_soon_as_it_is_whole() -> None:
    sentences = Sentences(1000)
    assert sentences.add("One. Two.") == ["One."]
    assert sentences.add(" T") == ["Two."]
    sentences.clear()
    assert sentences.add("hree. ") == ["hree."]


def test_what_has_no_end_is_cut_at_a_space() -> None:
    sentences = Sentences(10)
    assert sentences.add("aaa bbb ccc ddd") == ["aaa bbb"]
    assert sentences.add("x" * 20) == ["ccc", "dddxxxxxxx", "x" * 10]
    assert sentences.flush() == ["xxx"]


def test_a_paragraph_ends_a_sentence() -> None:
    assert Sentences(1000).add("A heading\n\nText") == ["A heading"]
