"""Uploaded voices on disk: one file each, written whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX = ".safetensors"
_Stamp = tuple[int, int, int]
"""Of a file, when it was written and which it is: written whole, it is another afterwards."""
_logger = logging.getLogger(__name__)


class VoiceStoreFull(Exception):
    """There are as many voices as there may be."""


@dataclass(frozen=True)
class StoredVoice:
    """A voice, by name."""

    name: str
    codes: NDArray[np.int64]
    """`[N]`, of the model's codec."""
    consent: str
    created: int
    """Seconds since 1970."""

    @property
    def id(self) -> str:
        """What it is, whatever it is called: another sample has another."""
        return hashlib.sha256(self.codes.astype("<i8").tobytes()).hexdigest()[:32]


class VoiceStore:
    """The voices of a folder, which several processes may share: what counts is what is there now.

    Each kind, which is a codec's, has a folder of its own in it: the codes of one are another sound
    to another. Files that are none of ours are let be.
    """

    def __init__(self, folder: Path, kind: str, max_voices: int) -> None:
        """Makes the kind's folder.

        Raises:
            OSError: it cannot be made.
            ValueError: a kind that is no name of a folder.
        """
        if not NAME.fullmatch(kind):
            raise ValueError(f"kind={kind!r}: must match {NAME.pattern}")
        self._folder, self._kind, self._max_voices = folder / kind, kind, max_voices
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._known: dict[str, tuple[_Stamp, StoredVoice | None]] = {}
        """By name, what was read, and of which file; None: it is none of ours."""
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            _logger.warning("%s is left out: it is not in the folder of a kind of voice", path)

    def list(self) -> list[StoredVoice]:
        """All voices, by name."""
        names = sorted(path.stem for path in self._folder.glob(f"*{_SUFFIX}"))
        self._known = {name: self._known[name] for name in names if name in self._known}
        voices = (self.get(name) for name in names)
        return [voice for voice in voices if voice is not None]

    def get(self, name: str) -> StoredVoice | None:
        """The voice of this name."""
        if not NAME.fullmatch(name):
            return None
        path = self._path(name)
        try:
            stamp = _stamp(path)
        except FileNotFoundError:
            return None
        known = self._known.get(name)
        if known is None or known[0] != stamp:
            known = self._known[name] = stamp, self._read(path)
        return known[1]

    def check(self, name: str) -> None:
        """See that there may be a voice of this name.

        Raises:
            ValueError: a name that is not letters, digits, ".", "_" and "-".
            VoiceStoreFull: naming the limit.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"name={name!r}: must match {NAME.pattern}")
        others = [voice.name for voice in self.list() if voice.name != name]
        if len(others) >= self._max_voices:
            raise VoiceStoreFull(
                f"name={name!r}: there are {len(others)} voices, of at most --max-voices "
                f"{self._max_voices}; delete one first"
            )

    def add(
        self, name: str, codes: NDArray[np.int64], *, consent: str, created: int
    ) -> StoredVoice:
        """Keep a voice; one of the same name is replaced. Raises as `check` does."""
        voice = StoredVoice(name, np.asarray(codes, np.int64), consent, created)
        said = {"name": name, "consent": consent, "created": str(created), "id": voice.id}
        data = save({"codes": voice.codes}, metadata={**said, "kind": self._kind})
        with self._alone():
            self.check(name)
            self._write(self._path(name), data)
        return voice

    def remove(self, name: str) -> StoredVoice | None:
        """Forget a voice, and return it, if there is one of this name."""
        with self._alone():
            if (voice := self.get(name)) is not None:
                self._path(name).unlink(missing_ok=True)
        return voice

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process changes the folder meanwhile."""
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _path(self, name: str) -> Path:
        return self._folder / (name + _SUFFIX)

    def _write(self, path: Path, data: bytes) -> None:
        """Whole, on the disk, and readable by its owner alone."""
        handle, part = tempfile.mkstemp(dir=self._folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise

    def _read(self, path: Path) -> StoredVoice | None:
        try:
            with safe_open(path, "np") as file:
                said, codes = file.metadata() or {}, file.get_tensor("codes")
            voice = StoredVoice(path.stem, codes, said["consent"], int(said["created"]))
            if said["kind"] != self._kind:
                raise ValueError(f"it is of the kind {said['kind']!r}, not {self._kind!r}")
            if said["name"] != voice.name or said["id"] != voice.id:
                raise ValueError("its name or its content has been changed")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            _logger.warning("%s is left out: %s", path, error)
            return None
        return voice


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size
