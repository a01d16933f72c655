"""The embedded voice's language model: what it is taught, and the folder it becomes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bounded_kv_speech.codec import Codec, CodecConfig, Encoder
from bounded_kv_speech.frames import CODE_RATE, SAMPLE_RATE
from bounded_kv_speech.lm import POSITION_LIMIT, SINK, WINDOW, export, token_names
from bounded_kv_speech.package import save
from bounded_kv_speech.recipe import train_lm, unpack
from bounded_kv_speech.recipe.corpus import marks_of
from bounded_kv_speech.recipe.teacher import Utterance
from bounded_kv_speech.recipe.train_codec import load_codec
from bounded_kv_speech.recipe.train_lm import NO_LABEL, Batch, Voice, positions_of, seen
from bounded_kv_speech.recipe.utterances import LEAD_CODES, Sittings, write
from bounded_kv_speech.tokens import (
    END,
    FIRST_CODE,
    FIRST_PHONE,
    SPEECH,
    TEXT,
    VOCAB_SIZE,
    VOICE,
    marks,
    to_phones,
)
from bounded_kv_speech.voice import codes_of

PHONEMES = "h\u02c8\u025bl\u0259 w\u02c8\u025cld."


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(CodecConfig(width=16, encoder_layers=1))


@pytest.fixture(scope="module")
def utterance() -> Utterance:
    """As the teacher would say it: a third of a second of silence, letters of 25 ms or more."""
    rng = np.random.default_rng(0)
    lengths = [0.35, *(0.027 * rng.integers(1, 5, size=len(PHONEMES))), 0.5]
    samples = rng.normal(0, 0.05, int(sum(lengths) * SAMPLE_RATE)).astype(np.float32)
    silence = np.zeros_like(samples)
    return Utterance(samples, silence, samples, samples, PHONEMES, np.cumsum(lengths))


def sittings() -> Sittings:
    """Two sittings of three utterances, each a phone for every second code."""
    rng, said = np.random.default_rng(1), []
    for i in range(6):
        phones = rng.integers(FIRST_PHONE, FIRST_CODE, size=20 + i)
        codes = rng.integers(FIRST_CODE, VOCAB_SIZE, size=(len(phones), 2))
        sound = np.concatenate([phones[:, None], codes], axis=1).reshape(-1)
        said.append(np.concatenate([[TEXT], phones, [SPEECH], sound]))
    starts = np.cumsum([0, *map(len, said)])
    return Sittings(np.concatenate(said).astype(np.int16), starts, np.array([0, 0, 0, 1, 1, 1]))


def test_an_utterance_is_its_phones_and_then_its_sound(
    utterance: Utterance, encoder: Encoder
) -> None:
    tokens = write(utterance, encoder)
    phones = to_phones(PHONEMES)
    speech = len(phones) + 1
    assert tokens[: speech + 1].tolist() == [TEXT, *phones, SPEECH]
    sound = tokens[speech + 1 :]
    assert [token for token in sound if token < FIRST_CODE] == phones
    assert (sound[:LEAD_CODES] >= FIRST_CODE).all()
    assert sound[LEAD_CODES] == phones[0]
    # Each code has the mark that the codec was trained with.
    codes = codes_of(utterance.samples, encoder)
    first = int(np.argmax(marks_of(utterance, len(codes)) != SPEECH)) - LEAD_CODES
    kept = sound >= FIRST_CODE
    count = int(kept.sum())
    assert (sound[kept] - FIRST_CODE).tolist() == codes[first : first + count].tolist()
    expected = marks_of(utterance, len(codes))[first : first + count]
    assert marks(tokens, VOICE)[speech + 1 :][kept].tolist() == expected.tolist()
    # Every phone has a code, as the logits processor asks for, and little silence ends it all.
    assert set(marks(tokens, VOICE)[speech + 1 :][kept]) >= set(phones)
    assert len(codes) - first - count > 0.3 * CODE_RATE


def test_the_mask_and_positions_are_the_engines() -> None:
    length = SINK + WINDOW + 40
    batch = Batch(
        torch.zeros(2, length, dtype=torch.long),
        torch.zeros(2, length, dtype=torch.long),
        torch.tensor([SINK, 40]),
        torch.tensor([0, POSITION_LIMIT - SINK - WINDOW]),
    )
    mask, positions = seen(batch), positions_of(batch)
    for row, sink in enumerate((SINK, 40)):
        for query in (0, 39, 40, sink + WINDOW - 1, sink + WINDOW, length - 1):
            visible = {j for j in range(query + 1) if j < sink or j > query - WINDOW}
            assert set(mask[row, query].nonzero().flatten().tolist()) == visible
    assert positions[0].tolist() == list(range(length))
    assert positions[1, 39].item() == 39
    assert positions[1, 40].item() == 40 + POSITION_LIMIT - SINK - WINDOW


def test_the_end_is_learned_and_never_seen() -> None:
    said = sittings()
    example = train_lm.example(said, 1, np.random.default_rng(0))
    tokens, labels, voice = example.tokens, example.labels, example.voice
    assert tokens[0] == VOICE
    assert (tokens[1:voice] >= FIRST_CODE).all()
    spoken = np.concatenate([said.utterance(1), said.utterance(2)])  # to the sitting's end
    assert tokens[voice : voice + len(spoken)].tolist() == spoken.tolist()
    assert END not in tokens
    ends = voice + np.array([len(said.utterance(1)), len(spoken)]) - 1
    assert np.flatnonzero(labels == END).tolist() == ends.tolist()
    # What the user says is not learned; of what the model says, each token follows the one before.
    is_text = np.zeros(len(tokens), bool)
    for number, start in ((1, voice), (2, ends[0] + 1)):
        is_text[start : start + int(np.argmax(said.utterance(number) == SPEECH))] = True
    unlearned = np.arange(len(tokens)) < voice
    unlearned |= is_text | (np.arange(len(tokens)) > ends[1])
    assert (labels[unlearned] == NO_LABEL).all()
    learned = ~unlearned & (labels != END)
    assert labels[learned].tolist() == tokens[1:][learned[:-1]].tolist()


def test_the_folder_is_the_model(tmp_path: Path) -> None:
    """`transformers` loads it as any Llama; half precision is all that is lost."""
    torch.manual_seed(0)
    voice = Voice().eval()
    with torch.no_grad():
        voice.own.mul_(20)
        export(tmp_path, voice.weights())
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        tokens = torch.randint(VOCAB_SIZE, (1, 30), generator=torch.Generator().manual_seed(1))
        length = torch.tensor([30])
        batch = Batch(tokens, tokens.roll(-1), length, torch.zeros(1, dtype=torch.long))
        loss = torch.nn.functional.cross_entropy(loaded(tokens).logits[0], tokens[0].roll(-1))
        assert loss.item() == pytest.approx(voice(batch).item(), abs=5e-3)
        assert loss.item() != pytest.approx(np.log(VOCAB_SIZE), abs=0.2)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10e6
    names = token_names()
    assert len(names) == len(set(names)) == VOCAB_SIZE == loaded.config.vocab_size
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = f"<voice> c0 c8191 <text> {names[FIRST_PHONE + 3]} <space> <speech>"
    assert tokenizer(text).input_ids == [
        *(VOICE, FIRST_CODE, VOCAB_SIZE - 1),
        *(TEXT, FIRST_PHONE + 3, FIRST_PHONE, SPEECH),
    ]


def test_training_can_go_on_from_a_package(tmp_path: Path) -> None:
    """Both models come out as they went in, but for half precision."""
    torch.manual_seed(0)
    voice, codec = Voice(), Codec(CodecConfig())
    with torch.no_grad():
        voice.own.mul_(20)
        voice.of_property.mul_(20)
    save(tmp_path / "package", voice.weights(), codec, {"robin": np.arange(40)})
    asked = ["--work", str(tmp_path / "work"), "--package", str(tmp_path / "package")]
    assert unpack.main(asked) == 0
    again, state = Voice(), torch.load(tmp_path / "work" / "packed.pt", weights_only=True)
    again.load_state_dict(state["model"])
    expected = {name: value.half().float() for name, value in voice.weights().items()}
    torch.testing.assert_close(again.weights(), expected, rtol=0, atol=1e-6)
    # What codes have in common is found again, not left in rows of their own.
    assert again.own[FIRST_CODE:].std() < 1.1 * voice.own[FIRST_CODE:].std()
    expected = {name: value.half().float() for name, value in codec.state_dict().items()}
    torch.testing.assert_close(load_codec(tmp_path / "work").state_dict(), expected)
    with pytest.raises(SystemExit):
        unpack.main(asked)  # nothing is overwritten
