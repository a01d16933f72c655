"""Text to utterances: sentences in phones, none longer than the model was taught.

The letters-to-phonemes part of `hibari-tts`, without its voice: that one is for training only.
"""

from __future__ import annotations

from math import ceil

from hibari import Hibari
from hibari.voices import DEFAULT

from bounded_kv_speech.tokens import SPEECH, TEXT, to_phones

LONGEST = 72
"""Phones of an utterance: nine of ten that the model learned from have no more. With its sound and
its echoes it fits the model's window; of 90, some came to be spoken for twice their time."""
_CLAUSES, _WORDS = frozenset(to_phones(",;:—")), frozenset(to_phones(" "))
_SILENT = frozenset(to_phones(" .,!?:;—"))


class FrontEnd(Hibari):  # type: ignore[misc]
    """Knows how words are said; loads no voice."""

    def __init__(self) -> None:
        """Lexica are loaded with the first text."""
        self.voice, self._g2p = DEFAULT, None

    def utterances(self, text: str) -> list[list[int]]:
        """What a stream is given for each sentence of `text`, or part of a long one, in turn.

        Text without anything that can be said has none.
        """
        sentences = (to_phones(phonemes) for phonemes in self.phonemize(text))
        return [
            [TEXT, *phones, SPEECH]
            for sentence in sentences
            if not _SILENT.issuperset(sentence)
            for phones in cut(sentence)
        ]


def cut(phones: list[int]) -> list[list[int]]:
    """Parts of at most `LONGEST` phones, about as long as each other.

    They end between clauses where that can be, or between words.
    """
    parts = []
    while len(phones) > LONGEST:
        aim = len(phones) / ceil(len(phones) / LONGEST)
        end = _nearest(phones, aim, _CLAUSES) or _nearest(phones, aim, _WORDS) or LONGEST
        parts.append(phones[:end])
        phones = phones[end:]
    return [part for part in (*parts, phones) if part]


def _nearest(phones: list[int], aim: float, marks: frozenset[int]) -> int:
    """Where the part ends whose last is one of `marks`, nearest to `aim`; 0 if none is within half
    of it."""
    ends = [i for i in range(1, LONGEST + 1) if phones[i - 1] in marks]
    end = min(ends, key=lambda i: abs(i - aim), default=0)
    return end if abs(end - aim) <= aim / 2 else 0
