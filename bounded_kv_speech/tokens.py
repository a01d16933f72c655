"""The language model's vocabulary: what a stream of the voice is written in.

    <voice> code code ...  <text> p1 p2 ... <speech> code p1 code code p2 code ... <end>  <text> ...

A voice is a sample's codes. Then come utterances: first all that is to be said, in phones; then the
sound, with an echo of each phone before its own codes (those before the first are silence). So a
code has a *mark*, the last token before it that is no code: the phone that sounds, or `SPEECH`, or
`VOICE` where nobody says what is said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bounded_kv_speech.fsq import NUM_CODES

PAD, VOICE, TEXT, SPEECH, END = range(5)
FIRST_PHONE, FIRST_CODE = 8, 128
VOCAB_SIZE = FIRST_CODE + NUM_CODES

_STRESSES = "ˈˌ"
_VOWELS = "iuæɑɔəɛɜɪʊʌAIOWYᵊᵻɐ"  # noqa: RUF001
_OTHERS = " .,!?:;—bdfhjklmnpstvwxzðŋɡɹɾʃʒʔʤʧθT"  # noqa: RUF001
PHONES = (*_OTHERS, *(stress + vowel for stress in ("", *_STRESSES) for vowel in _VOWELS))
"""Of American English, in the teacher's letters (Misaki's); a stressed vowel is one."""
_IDS = {phone: FIRST_PHONE + i for i, phone in enumerate(PHONES)}


def phone_spans(phonemes: str) -> list[tuple[int, int]]:
    """Tokens of a string of phonemes, each with the index behind its last letter.

    Letters that are no phone are left out: quotation marks, a stress on a consonant.
    """
    spans, stress = [], ""
    for i, letter in enumerate(phonemes):
        if letter in _STRESSES:
            stress = letter
        elif (token := _IDS.get(stress + letter, _IDS.get(letter))) is not None:
            spans.append((token, i + 1))
            stress = ""
    return spans


def to_phones(phonemes: str) -> list[int]:
    """Tokens of a string of phonemes."""
    return [token for token, _ in phone_spans(phonemes)]


def marks(tokens: Sequence[int] | NDArray[np.int64], mark: int) -> NDArray[np.int64]:
    """The mark of each of `tokens [N]`, int64, when `mark` is that of what came before.

    A token that is no code is its own.
    """
    ids = np.asarray(tokens, np.int64)
    known = np.concatenate([[mark], np.where(ids < FIRST_CODE, ids, mark)])
    last = np.where(np.concatenate([[True], ids < FIRST_CODE]), np.arange(len(ids) + 1), 0)
    return known[np.maximum.accumulate(last)][1:]
