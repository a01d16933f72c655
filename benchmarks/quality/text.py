"""Real text that ships with Python, the same for everyone who has the same Python.

`topics`: the language reference and help topics of `pydoc_data.topics`, 112,955 tokens in Python
3.11.7. `stdlib`: the same, then the source of the standard library's modules of one file, in name
order: more than a million tokens.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

JOINT = "\n\n"
TEXTS = ("topics", "stdlib")
BUILD_DATA = "_sysconfigdata"
"""Names of modules that describe one machine's build of Python start so."""


@dataclass(frozen=True)
class Text:
    """Tokens of a text: `ids` are the first `len(ids)` of it, without a BOS."""

    name: str
    ids: list[int]

    @property
    def sha256(self) -> str:
        """Of the ids, as little-endian int32."""
        return hashlib.sha256(np.array(self.ids, dtype="<i4").tobytes()).hexdigest()


def documents(name: str) -> Iterator[str]:
    """The documents of a text, in order; `ValueError` for a name that is none of `TEXTS`."""
    if name not in TEXTS:
        raise ValueError(f"--text={name!r}: must be one of {', '.join(TEXTS)}")
    from pydoc_data.topics import topics

    yield JOINT.join(topics[key] for key in sorted(topics))
    if name == "stdlib":
        folder = Path(sysconfig.get_path("stdlib"))
        for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
            if not path.name.startswith(BUILD_DATA):
                yield path.read_text(encoding="utf-8")


def load_text(name: str, model: str, num_tokens: int) -> Text:
    """The first `num_tokens` of a text by the model's tokenizer.

    Documents are tokenised one by one, each after the first behind a blank line, so a longer text
    starts with the same tokens.

    Args:
        name: one of `TEXTS`.
        model: folder with a `tokenizer.json`.
        num_tokens: at least 2.

    Raises:
        ValueError: naming the option, its value and the limit.
    """
    from tokenizers import Tokenizer

    if num_tokens < 2:
        raise ValueError(f"--tokens={num_tokens}: must be >= 2")
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    ids: list[int] = []
    for document in documents(name):
        piece = JOINT + document if ids else document
        ids += tokenizer.encode(piece, add_special_tokens=False).ids
        if len(ids) >= num_tokens:
            return Text(name, ids[:num_tokens])
    raise ValueError(f"--tokens={num_tokens}: the text {name!r} has {len(ids)} tokens")
