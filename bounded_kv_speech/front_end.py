"""Text to utterances: sentences in phones, none longer than the model was taught.

The letters-to-phonemes part of `hibari-tts`, without its voice: that one is for training only.
"""

from __future__ import annotations

from hibari import Hibari
from hibari.voices import DEFAULT

from bounded_kv_speech.tokens import SPEECH, TEXT, to_phones

LONGEST = 96
"""Phones of an utterance. With its sound and its echoes it fits the model's window."""
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
    """Parts of at most `LONGEST` phones: between clauses where that can be, or between words."""
    parts = []
    while len(phones) > LONGEST:
        end = _last(phones, _CLAUSES) or _last(phones, _WORDS) or LONGEST
        parts.append(phones[:end])
        phones = phones[end:]
    return [part for part in (*parts, phones) if part]


def _last(phones: list[int], marks: frozenset[int]) -> int:
    """Where the part up to the last of `marks` ends; 0 if that is less than half, or nowhere."""
    found = (i + 1 for i in range(LONGEST - 1, LONGEST // 2, -1) if phones[i] in marks)
    return next(found, 0)
