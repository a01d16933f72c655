"""The generic profile, `codec`: any language model over a codec of `transformers`, from a file.

codec: kyutai/mimi             # folder or hub name: DAC, EnCodec or Mimi
codebooks: 8                   # codes of a frame, one after the other
first_code: 128266             # token of the first codebook's code 0
codebook_size: 2048            # tokens of each codebook
end: "<|end_of_speech|>"       # tokens are numbers, or strings of the tokenizer's
before: ["<|start|>"]          # what an utterance is put into: before, voice, text, after
after: ["<|end|>", "<|speech|>"]
voices: {anna: "anna:"}        # text before an utterance, by the voice's name
sampling: {temperature: 0.7, top_p: 0.95, top_k: 0, repetition_penalty: 1.1}
most_frames: 12                # of speech, for one token of text
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bounded_kv_server import hub_codecs
from bounded_kv_server.codec_model import Codec, CodecModel, Codes, Manner, Prompt
from bounded_kv_server.profile import SpeechModel
from bounded_kv_server.settings import SpeechSettings

Token = int | str


class Sampling(BaseModel):
    """See the module."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(default=0.7, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0)


class Description(BaseModel):
    """See the module."""

    model_config = ConfigDict(extra="forbid")

    codec: str
    codebooks: int = Field(ge=1)
    first_code: int = Field(ge=0)
    codebook_size: int = Field(ge=2)
    end: Token
    before: list[Token] = []
    after: list[Token] = []
    voices: dict[str, str] = Field(min_length=1)
    sampling: Sampling = Sampling()
    most_frames: int = Field(default=12, ge=1)


def read(path: str) -> Description:
    """A description from its file.

    Raises:
        ValueError: naming the file, the field and what is wrong.
    """
    try:
        return Description.model_validate(
            yaml.safe_load(Path(path).expanduser().read_text("utf-8"))
        )
    except OSError as error:
        raise ValueError(f"--speech-config {path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--speech-config {path}: is not YAML: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "file"
        raise ValueError(f"--speech-config {path}: {field}: {first['msg']}") from error


def codec_model(
    engine_client: Any, tokenizer: Any, described: Description, codec: Codec
) -> CodecModel:
    """The model that is described.

    Raises:
        ValueError: a token that the tokenizer does not know.
    """

    def token(given: Token) -> int:
        if isinstance(given, int):
            return given
        found = tokenizer.convert_tokens_to_ids(given)
        if found is None or found == tokenizer.unk_token_id:
            raise ValueError(f"--speech-config: the tokenizer has no token {given!r}")
        return int(found)

    codes = Codes(
        described.first_code, described.codebook_size, described.codebooks, token(described.end)
    )
    prompt = Prompt(
        tuple(map(token, described.before)), tuple(map(token, described.after)), described.voices
    )
    manner = Manner(**described.sampling.model_dump(), most_frames=described.most_frames)
    return CodecModel(engine_client, tokenizer, codes, prompt, manner, codec)


class CodecProfile:
    """See `Profile`."""

    logits_processors = ()

    def load(self, engine_client: Any, settings: SpeechSettings) -> SpeechModel:
        """The served model, as `--speech-config` describes it."""
        if settings.speech_config is None:
            raise ValueError("--speech-profile codec: needs --speech-config FILE")
        described = read(settings.speech_config)
        codec = hub_codecs.load(settings.codec or described.codec, described.codebooks)
        return codec_model(engine_client, engine_client.get_tokenizer(), described, codec)


PROFILE = CodecProfile()
