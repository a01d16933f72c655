"""The body of `POST /v1/audio/speech`: OpenAI's, and a few fields of ours."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


def _voice(given: Any) -> Any:
    """A voice's name, also where it is given as `{"id": name}`."""
    if not isinstance(given, dict):
        return given
    if set(given) != {"id"}:
        raise ValueError('must be a name or {"id": name}')
    return given["id"]


Voice = Annotated[
    str,
    Field(min_length=1, max_length=64),
    BeforeValidator(_voice),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": 64},
                {
                    "type": "object",
                    "properties": {"id": {"type": "string", "minLength": 1, "maxLength": 64}},
                    "required": ["id"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


Salt = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")]
"""As vLLM takes them in its own requests."""


class Options(BaseModel):
    """How something is said, whatever it is."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    voice: Voice | None = None
    """Without one: the model's first."""
    seed: int | None = Field(None, ge=0, lt=2**63, strict=True)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    cache_salt: Salt | None = None
    """Of a tenant, as in vLLM's requests: no block of the cache is shared with another's."""


class SpeechRequest(Options):
    """What is to be said, and how it is sent."""

    input: str = Field(min_length=1)
    instructions: str | None = None
    response_format: Format = "mp3"
    speed: float = Field(1.0, ge=0.25, le=4.0, allow_inf_nan=False)
    stream_format: Literal["audio", "sse"] = "audio"
    max_duration_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Sound longer than this, as it is heard, is an error: nothing is cut short in silence."""
