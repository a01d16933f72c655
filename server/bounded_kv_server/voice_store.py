"""Uploaded voices on disk: one file each, written whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX = ".safetensors"
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
    """The voices of a folder, in memory too. Files that are none of ours are let be."""

    def __init__(self, folder: Path, max_voices: int) -> None:
        """Reads what is there.

        Raises:
            OSError: there is no such folder, and it cannot be made.
        """
        self._folder, self._max_voices = folder, max_voices
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = (self._read(path) for path in sorted(folder.glob(f"*{_SUFFIX}")))
        self._voices = {voice.name: voice for voice in found if voice is not None}

    def list(self) -> list[StoredVoice]:
        """All voices, by name."""
        return [self._voices[name] for name in sorted(self._voices)]

    def get(self, name: str) -> StoredVoice | None:
        """The voice of this name; also one that another process of the server has added."""
        if name not in self._voices and NAME.fullmatch(name) and self._path(name).exists():
            voice = self._read(self._path(name))
            if voice is not None:
                self._voices[name] = voice
        return self._voices.get(name)

    def add(
        self, name: str, codes: NDArray[np.int64], *, consent: str, created: int
    ) -> StoredVoice:
        """Keep a voice; one of the same name is replaced.

        Raises:
            ValueError: a name that is not letters, digits, ".", "_" and "-".
            VoiceStoreFull: naming the limit.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"name={name!r}: must match {NAME.pattern}")
        if name not in self._voices and len(self._voices) >= self._max_voices:
            raise VoiceStoreFull(
                f"name={name!r}: there are {len(self._voices)} voices, of at most --max-voices "
                f"{self._max_voices}; delete one first"
            )
        voice = StoredVoice(name, np.asarray(codes, np.int64), consent, created)
        said = {"name": name, "consent": consent, "created": str(created), "id": voice.id}
        self._write(self._path(name), save({"codes": voice.codes}, metadata=said))
        self._voices[name] = voice
        return voice

    def remove(self, name: str) -> None:
        """Forget a voice, if there is one of this name."""
        if self._voices.pop(name, None) is not None:
            self._path(name).unlink(missing_ok=True)

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
            if said["name"] != voice.name or said["id"] != voice.id:
                raise ValueError("its name or its content has been changed")
            if not NAME.fullmatch(voice.name):
                raise ValueError(f"its name does not match {NAME.pattern}")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            _logger.warning("%s is left out: %s", path, error)
            return None
        return voice
