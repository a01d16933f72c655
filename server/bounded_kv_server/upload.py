"""The form that brings a voice: a name, a sample, and that its speaker has consented."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from bounded_kv_server.errors import SpeechError
from bounded_kv_server.limits import within
from bounded_kv_server.sample_decoder import MAX_BYTES

FORM_BYTES = 64 * 1024
"""Of everything but the sample."""
READ_S = 30.0
"""That a client may take to send its form."""
AT_ONCE = 8
"""Uploads that are read, or wait for what makes voices of them."""
RETRY_AFTER_S = 10
CONSENTS = ("true", "yes", "1")


class Uploads:
    """How many there are."""

    num_open = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """One more of them.

        Raises:
            SpeechError: 503, there are `AT_ONCE`.
        """
        if self.num_open >= AT_ONCE:
            raise SpeechError(
                503,
                None,
                f"{self.num_open} samples of voices are being read; try again soon",
                RETRY_AFTER_S,
            )
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


@dataclass(frozen=True)
class Upload:
    """What the form says."""

    name: str
    sample: bytes
    consent: str


async def read_upload(request: Request) -> Upload:
    """Read the form.

    Raises:
        SpeechError: 400 or 413, naming the field; 408, it takes too long.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise SpeechError(400, None, "the body must be multipart/form-data")
    limited = Request(request.scope, _limited(request.receive))
    late = SpeechError(408, "audio_sample", f"audio_sample: has not come within {READ_S:g} s")
    try:
        async with (
            within(READ_S, late),
            limited.form(max_files=1, max_fields=8, max_part_size=FORM_BYTES) as form,
        ):
            unknown = set(form) - {"name", "consent", "audio_sample"}
            if unknown:
                raise SpeechError(400, min(unknown), f"{min(unknown)}: no such field")
            name, consent, sample = (form.get(f) for f in ("name", "consent", "audio_sample"))
            if not isinstance(name, str) or not name:
                raise SpeechError(400, "name", "name: is missing")
            if not isinstance(sample, UploadFile):
                raise SpeechError(400, "audio_sample", "audio_sample: a file is missing")
            if not isinstance(consent, str) or consent.lower() not in CONSENTS:
                raise SpeechError(
                    400,
                    "consent",
                    'consent: must be "true": whose voice it is has agreed to its use',
                )
            return Upload(name, await sample.read(), consent)
    except HTTPException as error:
        raise SpeechError(400, None, f"the form cannot be read: {error.detail}") from error


def _limited(receive: Receive) -> Receive:
    """The body, up to what a form may have."""
    most, read = MAX_BYTES + FORM_BYTES, 0

    async def limited() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > most:
            raise SpeechError(
                413, "audio_sample", f"audio_sample: must have at most {MAX_BYTES} bytes"
            )
        return message

    return limited


def upload_schema() -> dict[str, Any]:
    """For the OpenAPI document."""
    return {
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["name", "consent", "audio_sample"],
                        "properties": {
                            "name": {"type": "string", "minLength": 1, "maxLength": 64},
                            "consent": {"type": "string", "enum": list(CONSENTS)},
                            "audio_sample": {"type": "string", "format": "binary"},
                        },
                    }
                }
            },
        }
    }
