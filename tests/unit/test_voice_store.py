"""Voices on disk."""

from __future__ import annotations

import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bounded_kv_server.voice_store import VoiceStore, VoiceStoreFull

CODES = np.arange(40)


def add(store: VoiceStore, name: str, codes: np.ndarray = CODES) -> str:
    return store.add(name, codes, consent="true", created=5).id


def test_what_is_added_is_there_after_a_restart(tmp_path: Path) -> None:
    made = add(VoiceStore(tmp_path / "a" / "b", "a-codec", 4), "mine")
    (voice,) = VoiceStore(tmp_path / "a" / "b", "a-codec", 4).list()
    assert (voice.name, voice.id, voice.consent, voice.created) == ("mine", made, "true", 5)
    assert np.array_equal(voice.codes, CODES)
    (path,) = (tmp_path / "a" / "b" / "a-codec").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_ids_are_of_the_content(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path, "a-codec", 4)
    assert add(store, "a") == add(store, "b") != add(store, "a", CODES + 1)
    assert [voice.name for voice in store.list()] == ["a", "b"]


def test_there_is_a_limit_and_replacing_is_no_addition(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path, "a-codec", 2)
    add(store, "a")
    add(store, "b")
    add(store, "b", CODES + 1)
    with pytest.raises(VoiceStoreFull, match="--max-voices 2"):
        add(store, "c")
    store.remove("a")
    store.remove("a")
    add(store, "c")
    assert store.get("a") is None


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a" * 65, "ä", "a\n", "a\0"])
def test_names_are_no_paths(tmp_path: Path, name: str) -> None:
    store = VoiceStore(tmp_path / "in", "a-codec", 4)
    with pytest.raises(ValueError, match="must match"):
        add(store, name)
    assert store.get(name) is None
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "a-codec"]


def test_broken_and_foreign_files_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = VoiceStore(tmp_path, "a-codec", 9)
    for name in ("good", "cut", "renamed"):
        add(store, name)
    folder = tmp_path / "a-codec"
    cut = folder / "cut.safetensors"
    cut.write_bytes(cut.read_bytes()[:-9])
    (folder / "renamed.safetensors").rename(folder / "other.safetensors")
    (folder / "text.safetensors").write_text("hello")
    (folder / "x.part").write_text("half")
    assert [voice.name for voice in VoiceStore(tmp_path, "a-codec", 9).list()] == ["good"]
    assert len(caplog.records) == 3


def test_what_another_process_does_is_seen(tmp_path: Path) -> None:
    one, other = VoiceStore(tmp_path, "a-codec", 4), VoiceStore(tmp_path, "a-codec", 4)
    add(one, "a")
    assert [voice.name for voice in other.list()] == ["a"]
    changed = add(one, "a", CODES + 1)
    assert other.list()[0].id == changed
    found = other.get("a")
    assert found is not None and found.id == changed
    assert other.get("a") is found  # and not read again
    one.remove("a")
    assert (other.get("a"), other.list(), other.remove("a")) == (None, [], None)


def test_voices_of_another_codec_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = VoiceStore(tmp_path, "a-codec", 4), VoiceStore(tmp_path, "another", 4)
    made = add(one, "a")
    assert (other.get("a"), other.list()) == (None, [])
    assert add(other, "a", CODES + 1) != made == one.list()[0].id
    (tmp_path / "a-codec" / "a.safetensors").rename(tmp_path / "another" / "a.safetensors")
    assert other.list() == []
    assert "'a-codec', not 'another'" in caplog.text
    (tmp_path / "another" / "a.safetensors").rename(tmp_path / "a.safetensors")
    assert VoiceStore(tmp_path, "another", 4).list() == []
    assert "not in the folder of a kind" in caplog.text


def test_the_limit_holds_when_many_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a store of its own, as processes have."""
    monkeypatch.setattr("os.fsync", lambda _: time.sleep(0.02))

    def one(number: int) -> bool:
        try:
            add(VoiceStore(tmp_path, "a-codec", 3), f"voice-{number}")
        except VoiceStoreFull:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(one, range(8))) == 3


def test_what_cannot_be_written_leaves_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = VoiceStore(tmp_path, "a-codec", 4)
    before = add(store, "a")

    def fail(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(OSError, match="no space"):
            add(store, "a", CODES + 1)
    assert store.get("a") is not None and store.get("a").id == before  # type: ignore[union-attr]
    assert VoiceStore(tmp_path, "a-codec", 4).list()[0].id == before
    assert len(list((tmp_path / "a-codec").iterdir())) == 1
