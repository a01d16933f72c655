"""`/v1/audio/speech` and `/v1/audio/voices`, and the page that uses them."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from bounded_kv_server import errors, page
from bounded_kv_server.conversation import converse
from bounded_kv_server.counted import CountedRoute
from bounded_kv_server.encoding import content_type
from bounded_kv_server.errors import SpeechError, as_status
from bounded_kv_server.messages import describe
from bounded_kv_server.metrics import Clock
from bounded_kv_server.profile import Chosen
from bounded_kv_server.request import SpeechRequest
from bounded_kv_server.response import SpeechResponse, with_pauses
from bounded_kv_server.server import SpeechServer, server_of
from bounded_kv_server.sound import Ask, Sent, encoded
from bounded_kv_server.upload import read_upload, upload_schema

SPEECH, VOICES, SOCKET = "/v1/audio/speech", "/v1/audio/voices", "/v1/audio/speech/stream"
KEEP_ALIVE_S = 10.0
IGNORED = "X-Ignored-Fields"
"""Names fields that were given, and that the model has no use for."""
STREAM = "X-Stream-Id"
"""What the ids of a response's stream in `/v1/bounded_kv` begin with."""


def attach(app: FastAPI) -> None:
    """Add the routes."""
    tags: Any = ["audio"]
    app.add_exception_handler(SpeechError, errors.answer)
    sound: Any = {200: {"content": {"audio/*": {}, "text/event-stream": {}}}}
    counted = APIRouter(route_class=CountedRoute)
    counted.add_api_route(
        SPEECH, _speech, methods=["POST"], tags=tags, response_model=None, responses=sound
    )
    app.include_router(counted)
    app.add_api_route(VOICES, _list, methods=["GET"], tags=tags, response_model=None)
    app.add_api_route(
        VOICES,
        _add,
        methods=["POST"],
        tags=tags,
        response_model=None,
        status_code=201,
        openapi_extra=upload_schema(),
    )
    app.add_api_route(
        VOICES + "/{name}", _remove, methods=["DELETE"], tags=tags, response_model=None
    )
    app.add_api_websocket_route(SOCKET, converse)
    describe(app, SOCKET)
    page.attach(app)


@with_cancellation  # type: ignore[untyped-decorator]
async def _speech(body: SpeechRequest, raw_request: Request) -> Response:
    """Speech of a text, sent while it is made."""
    server, clock = server_of(raw_request.app), Clock()
    begun = False
    try:
        ask = await checked(server, body)
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-store", STREAM: ask.name}
        if body.instructions and not server.speaking().takes_instructions:
            headers[IGNORED] = "instructions"
        sound = encoded(server, ask, clock)
        if body.stream_format == "sse":
            content, kind = _events(sound, ask), "text/event-stream"
        else:
            content, kind = _raw(sound), content_type(body.response_format, server.speaking().rate)
        limit_s = server.settings.speech_idle_s
        response = SpeechResponse(content, clock, limit_s, media_type=kind, headers=headers)
        await response.begin()
        begun = True
        return response
    except Exception as error:
        failure = error if isinstance(error, SpeechError) else as_status(error)
        clock.close("failed" if failure.status == 500 else "refused")
        begun = True
        raise failure from error
    finally:
        if not begun:
            clock.close("left")


async def checked(server: SpeechServer, body: SpeechRequest) -> Ask:
    """What to say, and in which voice.

    Raises:
        SpeechError: naming the field that is wrong; or 503, too many wait.
    """
    server.check_model(body.model)
    most = server.settings.max_speech_input
    if len(body.input) > most:
        raise SpeechError(
            400,
            "input",
            f"input has {len(body.input)} characters; must have at most {most} "
            "(--max-speech-input); a longer text goes over the socket, piece by piece",
        )
    server.gate.check()  # a text is work, also of who is refused
    utterances = await server.utterances(body.input)
    if not utterances:
        raise SpeechError(400, "input", "input has nothing that can be said")
    assert server.voices is not None
    return Ask(
        utterances,
        server.voices.tokens(body.voice),
        Chosen(body.temperature, body.seed, body.cache_salt),
        body.response_format,
        body.speed,
        body.max_duration_s,
    )


async def _raw(sound: AsyncGenerator[Sent]) -> AsyncGenerator[bytes]:
    async with aclosing(sound):
        async for sent in sound:
            if sent.data:
                yield sent.data


async def _events(sound: AsyncGenerator[Sent], ask: Ask) -> AsyncGenerator[bytes]:
    """Server-sent events; one of an error is the last, when something fails on the way."""
    spoken, begun = 0, False
    async with aclosing(with_pauses(sound, KEEP_ALIVE_S)) as parts:
        try:
            async for sent in parts:
                if sent is None:
                    if begun:
                        yield b": keep-alive\n\n"
                    continue
                spoken += sent.num_tokens
                if sent.data:
                    begun = True
                    audio = base64.b64encode(sent.data).decode()
                    yield _event({"type": "speech.audio.delta", "audio": audio})
        except Exception as error:
            if not begun:
                raise
            failure = error if isinstance(error, SpeechError) else as_status(error)
            yield _event({"type": "error", **failure.body()})
            raise
    usage = {
        "input_tokens": len(ask.voice) + ask.longest,
        "output_tokens": spoken,
        "total_tokens": len(ask.voice) + ask.longest + spoken,
    }
    yield _event({"type": "speech.audio.done", "usage": usage})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def _list(request: Request) -> JSONResponse:
    """All voices."""
    server = server_of(request.app)
    server.speaking()
    assert server.voices is not None
    return JSONResponse({"object": "list", "data": [v.view() for v in server.voices.listed()]})


async def _add(request: Request) -> JSONResponse:
    """A voice from a sample of speech, by somebody who has consented to it."""
    server = server_of(request.app)
    server.speaking()
    assert server.voices is not None
    with server.uploads.one():
        upload = await read_upload(request)
        started = time.time()
        voice = await server.voices.add(upload.name, upload.sample, upload.consent)
    return JSONResponse(voice.view(), 201, {"X-Processing-S": f"{time.time() - started:.3f}"})


async def _remove(name: str, request: Request) -> JSONResponse:
    """Forget an uploaded voice."""
    server = server_of(request.app)
    server.speaking()
    assert server.voices is not None
    return JSONResponse({**(await server.voices.remove(name)).view(), "deleted": True})
