"""What a socket's client may send: JSON, one object a message."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from bounded_kv_server.request import Format, Options


class Config(Options):
    """The first message: how everything is said."""

    type: Literal["session.config"]
    response_format: Format = "pcm"
    speed: float = Field(1.0, ge=0.25, le=4.0, allow_inf_nan=False)


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Text(_Message):
    """More text: a word, a sentence, or less than either."""

    type: Literal["input.text"]
    text: str


class Done(_Message):
    """No more text for now: say what there is, and tell when it has been said."""

    type: Literal["input.done"]


class Clear(_Message):
    """Stop at once, and forget what has not been said."""

    type: Literal["input.clear"]


class Close(_Message):
    """Say what there is, then close."""

    type: Literal["session.close"]


Message = Annotated[Config | Text | Done | Clear | Close, Field(discriminator="type")]
MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)
