"""The embedded voice's codec, frame by frame, batched, is the codec at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bounded_kv_speech import fsq
from bounded_kv_speech.codec import QUERY_WINDOW, CodecConfig, Decoder, attend_at_once
from bounded_kv_speech.decode import StreamingDecoder, decode_at_once
from bounded_kv_speech.frames import CODE_SAMPLES, NUM_HARMONIC, NUM_NOISE
from bounded_kv_speech.tokens import FIRST_CODE, FIRST_PHONE, VOCAB_SIZE

STEP_16_BITS = 1 / 32768


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(CodecConfig(width=32, decoder_layers=2, heads=2))
    # As loud and as voiced as speech is: log amplitudes, a pitch about 150 Hz, voiced at times.
    decoder.mean[:NUM_HARMONIC] = -4.0
    decoder.mean[NUM_HARMONIC : NUM_HARMONIC + NUM_NOISE] = -6.0
    decoder.mean[-2:] = torch.tensor([5.0, 0.5])
    decoder.scale[-2:] = torch.tensor([0.3, 1.0])
    return decoder


def tokens_of(seed: int, count: int) -> list[int]:
    """Codes, and here and there a phone."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(FIRST_CODE, VOCAB_SIZE, size=count)
    phones = rng.integers(FIRST_PHONE, FIRST_CODE, size=count)
    return np.where(rng.random(count) < 0.2, phones, codes).tolist()


def num_samples(tokens: Sequence[int]) -> int:
    return sum(token >= FIRST_CODE for token in tokens) * CODE_SAMPLES


def cut(tokens: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """Pieces of the sizes given, in turn, for as long as there are tokens."""
    pieces, start, turn = [], 0, 0
    while start < len(tokens):
        pieces.append(tokens[start : start + sizes[turn % len(sizes)]])
        start, turn = start + sizes[turn % len(sizes)], turn + 1
    return pieces


@pytest.mark.parametrize("sizes", [[1], [2], [3, 1, 7], [QUERY_WINDOW + 4]], ids=str)
def test_any_chunks_are_the_stream_at_once(decoder: Decoder, sizes: list[int]) -> None:
    tokens = tokens_of(1, 90)
    streams = StreamingDecoder(decoder, 2)
    streams.open("a", seed=5)
    sound = np.concatenate(
        [streams.step({"a": piece}).get("a", []) for piece in cut(tokens, sizes)]
    )
    whole = decode_at_once(decoder, tokens, seed=5)
    assert len(sound) == num_samples(tokens)
    assert np.abs(sound - whole).max() < STEP_16_BITS
    assert np.abs(whole).max() > 0.01  # it is not silence that is compared


def test_streams_of_any_age_share_a_batch(decoder: Decoder) -> None:
    """Streams come, go and give their slots on; each sounds as it does alone."""
    rng = np.random.default_rng(3)
    streams = StreamingDecoder(decoder, 3)
    left: dict[str, list[int]] = {}
    whole: dict[str, list[int]] = {}
    heard: dict[str, list[np.ndarray]] = {}
    for number in range(9):
        name = f"s{number}"
        whole[name] = tokens_of(number, int(rng.integers(3, 40)))
    waiting = list(whole)
    while waiting or left:
        while waiting and len(left) < 3:
            name = waiting.pop(0)
            streams.open(name, seed=len(whole[name]))
            left[name], heard[name] = list(whole[name]), []
        chosen = [name for name in left if rng.random() < 0.7]
        step = {name: left[name][: int(rng.integers(1, 4))] for name in chosen}
        sound = streams.step(step)
        for name in chosen:
            heard[name].append(sound.get(name, np.zeros(0, np.float32)))
            del left[name][: len(step[name])]
            if not left[name]:
                del left[name]
                streams.close(name)
    for name, tokens in whole.items():
        alone = decode_at_once(decoder, tokens, seed=len(tokens))
        assert np.abs(np.concatenate(heard[name]) - alone).max() < STEP_16_BITS


def test_pulses_keep_their_phase_for_minutes(decoder: Decoder) -> None:
    """The same tokens over and over, in a batch and alone, far down the stream."""
    streams, alone = StreamingDecoder(decoder, 2), StreamingDecoder(decoder, 1)
    for each in (streams, alone):
        each.open("a")
    streams.open("b")
    tokens = tokens_of(7, 1000)
    for _ in range(6):
        together = streams.step({"a": tokens, "b": tokens[::-1]})["a"]
        difference = np.abs(together - alone.step({"a": tokens})["a"]).max()
        assert difference < STEP_16_BITS / 100


def test_nothing_far_back_is_heard(decoder: Decoder) -> None:
    """Each layer looks `QUERY_WINDOW` codes back, so two layers twice that."""
    codes = torch.randint(fsq.NUM_CODES, (1, 60), generator=torch.Generator().manual_seed(2))
    other, marks = codes.clone(), torch.full((2, 60), FIRST_PHONE)
    other[0, 0] = (other[0, 0] + 1) % fsq.NUM_CODES
    points = fsq.to_points(torch.cat([codes, other])).double()
    positions = torch.arange(60).expand(2, -1)
    frames = decoder.double()(points, marks, positions, attend_at_once)
    differs = (frames[0] - frames[1]).abs().amax(-1).reshape(60, -1).amax(-1) > 1e-12
    assert differs[: QUERY_WINDOW + 1].any()
    assert not differs[2 * QUERY_WINDOW + 1 :].any()


def test_a_mark_is_heard_until_the_next(decoder: Decoder) -> None:
    """The last phone goes on over the border between two steps, and over steps without a code."""
    code, phone, other = FIRST_CODE + 7, FIRST_PHONE + 1, FIRST_PHONE + 2
    streams = StreamingDecoder(decoder, 1)
    streams.open("a")
    assert streams.step({"a": [phone]}) == {}
    sound = [streams.step({"a": piece})["a"] for piece in ([code, code], [code, other, code])]
    same = decode_at_once(decoder, [phone, code, phone, code, phone, code, other, code])
    assert np.abs(np.concatenate(sound) - same).max() < STEP_16_BITS
    silent = decode_at_once(decoder, [code, code, code, other, code])
    assert np.abs(np.concatenate(sound) - silent).max() > 10 * STEP_16_BITS


def test_what_is_refused_changes_nothing(decoder: Decoder) -> None:
    streams = StreamingDecoder(decoder, 1)
    streams.open("a")
    tokens = tokens_of(4, 8)
    first = streams.step({"a": tokens[:4]})["a"]
    with pytest.raises(ValueError, match="open already"):
        streams.open("a")
    with pytest.raises(ValueError, match=r"tokens must be in \[0, "):
        streams.step({"a": [VOCAB_SIZE]})
    with pytest.raises(ValueError, match="one or more"):
        streams.step({"a": []})
    with pytest.raises(KeyError):
        streams.step({"z": tokens})
    streams.open("b")
    with pytest.raises(RuntimeError, match="max_slots"):
        streams.step({"a": tokens[4:], "b": tokens})
    rest = streams.step({"a": tokens[4:]})["a"]
    whole = decode_at_once(decoder, tokens)
    assert np.abs(np.concatenate([first, rest]) - whole).max() < STEP_16_BITS
