"""Sentences to learn from and to be judged by: Debian's `fortunes`, as the package ships them.

Kept are sentences of plain words that the teacher's lexicon and the judge's dictionary both know.
Which of them are never learned from is a matter of their hash.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hibari
import pocketsphinx

PACKAGES = ("fortunes-min", "fortunes")
WORDS = (3, 20)
UNSEEN_SHARE = 0.03
UNSEEN_WORDS = (4, 14)
_SENTENCE = re.compile(r"[A-Z][A-Za-z' ,;:-]*[.!?]")
_SHOUTED = re.compile(r"\b[A-Z]{2,}\b")


def download(folder: Path) -> Path:
    """Fetch and unpack the packages into `folder`; returns where the texts lie.

    Raises:
        RuntimeError: when Debian's tools are not there or cannot reach an archive.
    """
    texts = folder / "usr/share/games/fortunes"
    if texts.is_dir():
        return texts
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            subprocess.run(
                ["apt-get", "download", *PACKAGES], cwd=scratch, check=True, capture_output=True
            )
            for package in sorted(Path(scratch).glob("*.deb")):
                subprocess.run(["dpkg", "-x", package, folder], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", b"") or str(error).encode()
            raise RuntimeError(
                f"cannot fetch Debian's {' and '.join(PACKAGES)}: {detail.decode().strip()}; "
                f"unpack them into {folder} by hand (dpkg -x)"
            ) from error
    return texts


def known_words() -> set[str]:
    """Words, in lower case, that both the teacher and the judge have in their lists."""
    assets = Path(hibari.__file__).parent / "assets"
    said = set()
    for name in ("lexicon_us_gold", "lexicon_us_silver"):
        with gzip.open(assets / f"{name}.json.gz", "rt", encoding="utf-8") as file:
            said |= {word.lower() for word in json.load(file)}
    dictionary = Path(pocketsphinx.get_model_path("en-us/cmudict-en-us.dict"))
    lines = dictionary.read_text(encoding="utf-8").splitlines()
    return said & {line.split()[0] for line in lines}


def sentences(texts: Path) -> list[str]:
    """All sentences that are kept, each once, in an order of their own."""
    known = known_words()
    kept = {sentence.lower(): sentence for sentence in _all(texts) if _is_kept(sentence, known)}
    return sorted(kept.values(), key=_digest)


def load(work: Path) -> tuple[list[str], list[str]]:
    """Sentences to learn from, and those never learned from, with a work folder's own texts."""
    return split(sentences(download(work / "text")))


def split(found: list[str]) -> tuple[list[str], list[str]]:
    """Those to learn from, and those never learned from."""
    seen = [s for s in found if not _is_unseen(s)]
    unseen = [s for s in found if _is_unseen(s)]
    low, high = UNSEEN_WORDS
    return seen, [s for s in unseen if low <= len(s.split()) <= high]


def _all(texts: Path) -> Iterator[str]:
    for path in sorted(texts.iterdir()):
        if path.suffix or not path.is_file():
            continue
        for item in path.read_text(encoding="utf-8", errors="ignore").split("\n%\n"):
            spoken = re.sub(r"\n\s*--.*", "", item, flags=re.DOTALL)
            for sentence in re.split(r"(?<=[.!?])[\"']?\s+", re.sub(r"\s+", " ", spoken)):
                yield sentence.strip(" \"'`*-")


def _is_kept(sentence: str, known: set[str]) -> bool:
    if not _SENTENCE.fullmatch(sentence) or _SHOUTED.search(sentence):
        return False
    low, high = WORDS
    words = re.findall(r"[A-Za-z']+", sentence)
    return low <= len(words) <= high and all(word.lower() in known for word in words)


def _digest(sentence: str) -> str:
    return hashlib.sha256(sentence.encode()).hexdigest()


def _is_unseen(sentence: str) -> bool:
    return int(_digest(sentence)[-8:], 16) < UNSEEN_SHARE * 16**8
