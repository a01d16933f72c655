"""A voice package is what was saved, and a voice is the sound in its sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bounded_kv_speech.codec import Codec, CodecConfig
from bounded_kv_speech.decode import decode_at_once
from bounded_kv_speech.frames import CODE_RATE, CODE_SAMPLES, SAMPLE_RATE
from bounded_kv_speech.lm import SINK
from bounded_kv_speech.package import Package, save
from bounded_kv_speech.recipe.train_lm import Voice
from bounded_kv_speech.tokens import FIRST_CODE, VOICE
from bounded_kv_speech.voice import codes_of, voice_of


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    codec = Codec(CodecConfig())
    codec.load_state_dict({k: v.half().float() for k, v in codec.state_dict().items()})
    folder = tmp_path_factory.mktemp("package")
    voices = {"one": np.arange(SINK - 1), "two": np.arange(40) + 8000}
    save(folder, Voice().weights(), codec, voices)
    loaded = Package.load(folder)
    for key, value in loaded.codec.state_dict().items():
        assert torch.equal(value, codec.state_dict()[key]), key
    return loaded


def noise(seconds: float, level: float = 0.1) -> np.ndarray:
    count = int(seconds * SAMPLE_RATE)
    return np.random.default_rng(0).normal(0, level, count).astype(np.float32)


def test_a_package_is_what_was_saved(package: Package) -> None:
    assert list(package.voices) == ["one", "two"]
    assert package.voices["two"] == [VOICE, *(np.arange(40) + 8000 + FIRST_CODE).tolist()]
    assert len(decode_at_once(package.codec.decoder, package.voices["two"])) == 40 * CODE_SAMPLES
    size = sum(path.stat().st_size for path in package.folder.rglob("*") if path.is_file())
    assert size < 20e6


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no voice package: it has no lm/config.json"):
        Package.load(tmp_path)


def test_a_voice_is_the_sound_in_its_sample(package: Package) -> None:
    """Silence before it is left out, and what is more than fills the sink."""
    silence = np.zeros(SAMPLE_RATE, np.float32)
    sample = np.concatenate([silence, noise(1.5), silence])
    codes = voice_of(sample, package.codec.encoder)
    assert len(codes) == pytest.approx(1.5 * CODE_RATE, abs=1)
    everything = codes_of(sample, package.codec.encoder)
    assert codes.tolist() == everything[CODE_RATE : CODE_RATE + len(codes)].tolist()
    assert len(voice_of(noise(10), package.codec.encoder)) == SINK - 1


@pytest.mark.parametrize("samples", [noise(0), noise(0.01), noise(0.9), 0 * noise(3)])
def test_a_sample_too_short_is_refused(package: Package, samples: np.ndarray) -> None:
    with pytest.raises(ValueError, match="must have 1 s at least"):
        voice_of(samples, package.codec.encoder)
