"""Text that comes piece by piece, cut into sentences as soon as they are whole."""

from __future__ import annotations

import re

_END = re.compile(
    r"""(?<![.!?…])[.!?…]++["'\u201d\u2019)\]]*+(?:\s++|(\Z))|\n[^\S\n]*+(?:\n\s*+|(\Z))"""
)
"""A sentence's end is known by what follows it: the point of "3.5" is none. A group that matches
says that nothing has followed yet. No character is looked at from two starts."""
_SHORT = re.compile(r"(?i)\b(mr|mrs|ms|dr|prof|st|mt|vs|no|e\.g|i\.e|[a-z]\.[a-z])\.\s*$")
"""Ends in a point without ending a sentence, mostly."""


class Sentences:
    """Collects pieces; a sentence that has no end by `longest` characters is cut at a space."""

    def __init__(self, longest: int) -> None:
        self._longest, self._text = longest, ""
        self._scanned = 0
        """Characters of the text that no end begins in, whatever comes."""

    def add(self, piece: str) -> list[str]:
        """The sentences that are whole now, in order."""
        self._text += piece
        found: list[str] = []
        begin = 0
        while cut := self._cut(begin):
            found.append(self._text[begin:cut].strip())
            begin, self._scanned = cut, cut
        self._text, self._scanned = self._text[begin:], self._scanned - begin
        return [sentence for sentence in found if sentence]

    def _cut(self, begin: int) -> int | None:
        """Where the sentence ends that begins at `begin`; None: that is not known yet."""
        text, last = self._text, begin + self._longest
        scanned = len(text)
        for match in _END.finditer(text, self._scanned, last):
            if match.lastindex is None and self._is_end(match, begin):
                return match.end()
            if match.end() == len(text):  # what comes may belong to it
                scanned = match.start()
        if len(text) > last:
            return text.rfind(" ", begin, last) + 1 or last
        self._scanned = scanned
        return None

    def _is_end(self, match: re.Match[str], begin: int) -> bool:
        before = self._text[max(begin, match.start() - 8) : match.end()]
        return match.start() > begin and _SHORT.search(before) is None

    def flush(self) -> list[str]:
        """What is left, whole or not."""
        rest = self._text.strip()
        self.clear()
        return [rest] if rest else []

    def clear(self) -> None:
        """Forget what is left."""
        self._text, self._scanned = "", 0
