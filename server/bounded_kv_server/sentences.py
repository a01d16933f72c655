"""Text that comes piece by piece, cut into sentences as soon as they are whole."""

from __future__ import annotations

import re

_END = re.compile(r"""[.!?…]+["'\u201d\u2019)\]]*\s+|\n\s*\n""")
"""A sentence's end is known by what follows it: the point of "3.5" is none."""
_SHORT = re.compile(r"(?i)\b(mr|mrs|ms|dr|prof|st|mt|vs|no|e\.g|i\.e|[a-z]\.[a-z])\.\s*$")
"""Ends in a point without ending a sentence, mostly."""


class Sentences:
    """Collects pieces; a sentence that has no end by `longest` characters is cut at a space."""

    def __init__(self, longest: int) -> None:
        self._longest, self._text = longest, ""

    def add(self, piece: str) -> list[str]:
        """The sentences that are whole now, in order."""
        self._text += piece
        found: list[str] = []
        while True:
            match = next((m for m in _END.finditer(self._text) if self._is_end(m)), None)
            if match and match.end() <= self._longest:
                cut = match.end()
            elif len(self._text) > self._longest:
                cut = self._text.rfind(" ", 0, self._longest) + 1 or self._longest
            else:
                return found
            found.append(self._text[:cut].strip())
            self._text = self._text[cut:]

    def _is_end(self, match: re.Match[str]) -> bool:
        before = self._text[max(0, match.start() - 8) : match.end()]
        return match.start() > 0 and _SHORT.search(before) is None

    def flush(self) -> list[str]:
        """What is left, whole or not."""
        rest, self._text = self._text.strip(), ""
        return [rest] if rest else []

    def clear(self) -> None:
        """Forget what is left."""
        self._text = ""
