"""Text in pieces, cut into sentences."""

from __future__ import annotations

import random
import re
import time

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


ALPHABET = ["a", "Mr", "e.g", ".", "...", "!", '"', ")", " ", "  ", "\n", " \n\n"]


def naive(text: str) -> list[str]:
    """What `Sentences` finds in a text at once, looked for in the plain way."""
    end = re.compile(r"""[.!?…]+["'\u201d\u2019)\]]*\s+|\n\s*\n\s*""")
    found, begin = [], 0
    for match in end.finditer(text):
        before = text[max(begin, match.start() - 8) : match.end()]
        if match.start() > begin and not re.search(r"(?i)\b(mr|e\.g)\.\s*$", before):
            found.append(text[begin : match.end()].strip())
            begin = match.end()
    return [sentence for sentence in [*found, text[begin:].strip()] if sentence]


@pytest.mark.parametrize("seed", range(300))
def test_it_finds_what_a_plain_search_does(seed: int) -> None:
    rng = random.Random(seed)
    text = "a" + "".join(rng.choices(ALPHABET, k=40))
    sentences = Sentences(1000)
    assert [*sentences.add(text), *sentences.flush()] == naive(text)


@pytest.mark.parametrize("longest", [5, 1000])
@pytest.mark.parametrize("seed", range(100))
def test_nothing_is_lost_however_it_comes(seed: int, longest: int) -> None:
    rng, sentences, found, sent = random.Random(seed), Sentences(longest), [], ""
    for _ in range(40):
        piece = "".join(rng.choices(ALPHABET, k=rng.randint(0, 3)))
        sent += piece
        found += sentences.add(piece)
    found += sentences.flush()
    assert "".join("".join(found).split()) == "".join(sent.split())
    assert all(0 < len(sentence) <= longest for sentence in found)


@pytest.mark.parametrize("text", [".", '."', ". ", "\n", " ", "\n.", "a"])
@pytest.mark.parametrize("longest", [400, 10**6])
def test_long_texts_take_time_in_proportion(text: str, longest: int) -> None:
    def seconds(count: int) -> float:
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            Sentences(longest).add(text * count)
            taken.append(time.perf_counter() - start)
        return min(taken)

    assert seconds(40_000) < 40 * seconds(4_000)
