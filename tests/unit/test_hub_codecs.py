"""transformers' codecs, small and with random weights: streamed as decoded at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DacConfig,
    DacModel,
    EncodecConfig,
    EncodecModel,
    MimiModel,
)

from bounded_kv_server.codec_model import Codes, FrameReader, Speech
from bounded_kv_server.codec_profile import codec_model, read
from bounded_kv_server.hub_codecs import codec_of, load
from examples.streaming_decoders.mimi import small_config

FRAMES, CODEBOOKS = 60, 3
NEAR = 1e-9


def dac() -> Any:
    config = DacConfig(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=16,
        upsampling_ratios=[4, 2],
        n_codebooks=CODEBOOKS,
        codebook_size=32,
        codebook_dim=4,
        sampling_rate=16_000,
    )
    return DacModel(config)


def encodec() -> Any:
    config = EncodecConfig(
        hidden_size=16,
        num_filters=4,
        upsampling_ratios=[4, 2],
        codebook_size=32,
        codebook_dim=16,
        target_bandwidths=[240.0],
        sampling_rate=24_000,
    )
    return EncodecModel(config)


def mimi() -> Any:
    return MimiModel(small_config(num_semantic_quantizers=1, frame_rate=24_000 / 16))


@pytest.fixture(scope="module", params=[dac, encodec, mimi], ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = request.param().double().eval()
    for name, value in made.named_buffers():
        if name.endswith("embed"):  # EnCodec's codebooks begin as zeros
            value.normal_()
        if name.endswith("embed_sum"):
            value.normal_()
    return made


def at_once(model: Any, frames: np.ndarray) -> np.ndarray:
    codes = torch.from_numpy(frames.T)[None]
    with torch.inference_mode():
        if isinstance(model, DacModel):
            return model.decode(audio_codes=codes).audio_values.reshape(-1).numpy()
        if isinstance(model, EncodecModel):
            return model.decode(codes[None], [None]).audio_values.reshape(-1).numpy()
        return model.decode(codes).audio_values.reshape(-1).numpy()


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    return np.random.default_rng(1).integers(16, size=(FRAMES, CODEBOOKS))


@pytest.mark.parametrize("sizes", [[1], [2, 5], [FRAMES]])
def test_streamed_is_at_once(model: Any, frames: np.ndarray, sizes: list[int]) -> None:
    codec = codec_of(model, CODEBOOKS)
    stream, parts, at, i = codec.stream(0), [], 0, 0
    while at < FRAMES:
        parts.append(stream.feed(frames[at : at + sizes[i % len(sizes)]]))
        at += sizes[i % len(sizes)]
        i += 1
    parts.append(stream.finish())
    samples = np.concatenate([part for part in parts if len(part)])
    whole = at_once(model, frames)
    assert len(samples) == FRAMES * codec.frame_samples
    assert whole.std() > 1e-3
    # DAC's own decoding leaves out what its odd paddings do not give.
    assert abs(len(whole) - len(samples)) < codec.frame_samples
    least = min(len(whole), len(samples))
    assert np.abs(samples[:least] - whole[:least]).max() < NEAR


def test_each_utterance_is_decoded_by_itself(model: Any, frames: np.ndarray) -> None:
    codec, codes = codec_of(model, CODEBOOKS), Codes(10, 16, CODEBOOKS, 5)
    tokens = (frames + 10 + 16 * np.arange(CODEBOOKS)).reshape(-1).tolist()
    cut = 25 * CODEBOOKS
    speech = Speech(FrameReader(codes), lambda: codec.stream(0))
    first = [speech.add([(tokens[:9], False)]), speech.add([(tokens[9:cut], True)])]
    last = [speech.add([(tokens[cut:-9], False)]), speech.add([(tokens[-9:], True)])]
    for found, part in [(first, frames[:25]), (last, frames[25:])]:
        alone = codec.stream(0)
        wanted = np.concatenate([alone.feed(part), alone.finish()])
        assert len(wanted) == len(part) * codec.frame_samples
        assert np.abs(np.concatenate(found) - wanted).max() < NEAR


def test_streams_are_apart(model: Any, frames: np.ndarray) -> None:
    codec = codec_of(model, CODEBOOKS)
    one, other = codec.stream(0), codec.stream(0)
    other.feed(frames[::-1][:20])
    parts = [one.feed(frames[:20]), one.feed(frames[20:]), one.finish()]
    found = np.concatenate([part for part in parts if len(part)])
    least = min(len(found), len(at_once(model, frames)))
    assert np.abs(found[:least] - at_once(model, frames)[:least]).max() < NEAR


def test_codebooks_that_are_not_there_are_named(model: Any) -> None:
    if not isinstance(model, EncodecModel):  # which has as many as its bandwidth gives
        with pytest.raises(ValueError, match="codebooks 99"):
            codec_of(model, 99)


def test_another_model_is_no_codec(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="'llama'"):
        load(str(tiny_model), 1)


DESCRIPTION = """
codec: somewhere
codebooks: 3
first_code: 100
codebook_size: 16
end: "<end>"
before: [7]
after: ["<speech>"]
voices: {anna: "anna:"}
sampling: {temperature: 0.5}
"""


def tokenizer() -> Any:
    known = {"<end>": 3, "<speech>": 4}
    return SimpleNamespace(
        unk_token_id=0,
        convert_tokens_to_ids=lambda token: known.get(token, 0),
        encode=lambda text, add_special_tokens: [ord(letter) for letter in text],
    )


def test_a_description_is_a_model(tmp_path: Path, model: Any) -> None:
    path = tmp_path / "speech.yaml"
    path.write_text(DESCRIPTION)
    made = codec_model(None, tokenizer(), read(str(path)), codec_of(model, 3))
    assert made.voices == {"anna": [7, *map(ord, "anna:")]}
    assert made.utterances("Hi.") == [[*map(ord, " Hi."), 4]]
    assert made._codes.end == 3


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("codebooks: 3", "codebooks: 0", "codebooks"),
        ("first_code: 100\n", "", "first_code"),
        ("sampling: {temperature: 0.5}", "sampling: {temperature: 9}", "sampling.temperature"),
        ("codec:", "codek:", "codec"),
        ("voices: {anna", "voices: {{", "YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    path = tmp_path / "speech.yaml"
    path.write_text(DESCRIPTION.replace(old, new))
    with pytest.raises(ValueError, match=named):
        read(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        read(str(tmp_path / "none.yaml"))


def test_an_unknown_token_is_named(tmp_path: Path) -> None:
    path = tmp_path / "speech.yaml"
    path.write_text(DESCRIPTION.replace("<end>", "<fin>"))
    with pytest.raises(ValueError, match="<fin>"):
        codec_model(None, tokenizer(), read(str(path)), None)
