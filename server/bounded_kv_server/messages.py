"""What a socket's client may send: JSON, one object a message."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI
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


def describe(app: FastAPI, path: str) -> None:
    """Add the messages to the app's OpenAPI document, which has no word for sockets of its own."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        document = plain()
        if "x-websockets" not in document:
            name = "#/components/schemas/SpeechSocket{model}"
            schema = MESSAGE.json_schema(ref_template=name)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for model, its_schema in schema.pop("$defs").items():
                schemas[f"SpeechSocket{model}"] = its_schema
            document["x-websockets"] = {path: {"client": schema}}
        return document

    app.openapi = described  # type: ignore[method-assign]
