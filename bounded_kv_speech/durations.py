"""How long a phone may last: longer than nearly all that the model has learned from, and no more.

A model that has lost its way sustains a phone for ever; what it learned from never did.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bounded_kv_speech.tokens import END, FIRST_PHONE, PHONES, to_phones

LEAD = 6
"""Codes of the silence before an utterance's first phone; learned were 3."""
SPACE, PAUSE, LAST_PAUSE = 5, 7, 10
OTHER, BEFORE_PAUSE = 8, 18
STRESSED, STRESSED_BEFORE_PAUSE = 12, 24
"""Codes at most, about the longest of what was learned from. What a pause follows is drawn out."""
LONGEST = STRESSED_BEFORE_PAUSE
_SPACES, _PAUSES = frozenset(to_phones(" ")), frozenset(to_phones(".,!?:;—"))


def longest(phones: Sequence[int]) -> NDArray[np.int64]:
    """Codes at most before an utterance's first phone, then of each of its phones: `[N + 1]`."""
    following = [*phones[1:], END]
    return np.array([LEAD, *map(_longest, phones, following)])


def _longest(phone: int, following: int) -> int:
    is_last = following in _PAUSES or following == END
    if phone in _PAUSES:
        return LAST_PAUSE if is_last else PAUSE
    if phone in _SPACES:
        return SPACE
    if FIRST_PHONE <= phone < FIRST_PHONE + len(PHONES) and len(PHONES[phone - FIRST_PHONE]) > 1:
        return STRESSED_BEFORE_PAUSE if is_last else STRESSED
    return BEFORE_PAUSE if is_last else OTHER
