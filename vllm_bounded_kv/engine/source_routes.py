"""`/v1/bounded_kv/sources`: pin a source, look at those pinned, let one go."""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_bounded_kv.engine import replicas
from vllm_bounded_kv.engine.compat import SOURCES_METHOD
from vllm_bounded_kv.engine.sources import SourceError

PATH = "/v1/bounded_kv/sources"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
MIN_TTL_S = 1.0

Salt = Annotated[str | None, Header(alias="X-Cache-Salt")]


class NewSource(BaseModel):
    """What to pin: text, chat messages or tokens, under a name."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=NAME_PATTERN)
    prompt: str | None = Field(None, min_length=1)
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    prompt_token_ids: list[Annotated[int, Field(ge=0, strict=True)]] | None = Field(
        None, min_length=1
    )
    add_special_tokens: bool = True
    """Of `prompt`, as in completions."""
    ttl_s: float | None = Field(None, ge=MIN_TTL_S, allow_inf_nan=False, strict=True)
    """Seconds until it is let go, counted from here. `None`: never."""
    cache_salt: str | None = None
    """The tenant, as in requests."""

    @property
    def field(self) -> str:
        """What holds the source itself."""
        if self.prompt is not None:
            return "prompt"
        return "messages" if self.messages is not None else "prompt_token_ids"

    @model_validator(mode="after")
    def _one_content(self) -> NewSource:
        given = [
            field
            for field in ("prompt", "messages", "prompt_token_ids")
            if getattr(self, field) is not None
        ]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of prompt, messages and prompt_token_ids, not {given or 'none'}"
            )
        return self


def attach(app: FastAPI) -> None:
    """Add the routes."""
    tags: Any = ["bounded_kv"]
    app.add_api_route(PATH, _pin, methods=["POST"], tags=tags, response_model=None)
    app.add_api_route(PATH, _list, methods=["GET"], tags=tags, response_model=None)
    one = PATH + "/{name}"
    app.add_api_route(one, _show, methods=["GET"], tags=tags, response_model=None)
    app.add_api_route(one, _delete, methods=["DELETE"], tags=tags, response_model=None)


async def call(engine: Any, action: str, **values: Any) -> dict[str, Any]:
    """Ask the engine core, or those of all replicas: see `sources.handle`.

    Raises:
        SourceError: what it refuses.
    """
    try:
        answers = await replicas.ask_all(engine, SOURCES_METHOD, action, values)
    except replicas.EngineGone as gone:
        raise SourceError(503, None, str(gone)) from gone
    answer = replicas.all_sources(action, answers)
    if error := answer.get("error"):
        raise SourceError(error["status"], error["field"], error["message"])
    return answer


def refusal(error: SourceError) -> JSONResponse:
    """The error in OpenAI's envelope."""
    kind = {400: "BadRequestError", 404: "NotFoundError", 409: "ConflictError"}
    return JSONResponse(
        {
            "error": {
                "message": str(error),
                "type": kind.get(error.status, "ServiceUnavailableError"),
                "param": error.field,
                "code": error.status,
            }
        },
        status_code=error.status,
    )


def checked_salt(salt: str | None) -> str | None:
    """The salt, when it is one that vLLM takes in requests.

    Raises:
        SourceError: naming what is wrong with it.
    """
    from vllm.entrypoints.generate.base.protocol import validate_cache_salt
    from vllm.exceptions import VLLMValidationError

    try:
        validate_cache_salt(salt)
    except VLLMValidationError as error:
        raise SourceError(400, "cache_salt", str(error)) from error
    # A header must be able to carry it.
    if salt is not None and (salt != salt.strip() or not salt.isprintable()):
        raise SourceError(
            400,
            "cache_salt",
            f"cache_salt={salt!r}: must be printable, without spaces at its ends",
        )
    return salt


async def _pin(source: NewSource, request: Request) -> JSONResponse:
    """Compute a source once and pin its full blocks."""
    engine = request.app.state.bounded_kv_engine
    try:
        salt = checked_salt(source.cache_salt)
        token_ids = await _tokens(source, request)
        answer = await pin(engine, source.name, token_ids, salt, source.field, source.ttl_s)
    except SourceError as error:
        return refusal(error)
    return JSONResponse(answer["source"], status_code=201 if answer["is_new"] else 200)


async def pin(
    engine: Any,
    name: str,
    token_ids: list[int],
    salt: str | None = None,
    field: str = "prompt_token_ids",
    ttl_s: float | None = None,
) -> dict[str, Any]:
    """Pin tokens as the source `name`, computed before this returns.

    Args:
        field: what an error about the tokens names.

    Returns:
        `source`, as the route shows it, and `is_new`.

    Raises:
        SourceError: what is refused; nothing is pinned then.
    """
    named = {"name": name, "cache_salt": salt}
    claim = uuid.uuid4().hex
    try:
        answer = await call(
            engine, "add", **named, token_ids=token_ids, field=field, ttl_s=ttl_s, claim=claim
        )
        if not answer["source"]["is_computed"]:
            await _compute(engine, token_ids, salt)
            answer["source"] = await _computed(engine, named, answer["source"]["id"])
    except BaseException:
        # Several replicas have it all, or none has it.
        several = len(replicas.numbers(engine)) > 1
        await call(engine, "abandon", **named, claim=claim, even_computed=several)
        raise
    return answer


async def _computed(engine: Any, named: dict[str, Any], source_id: str) -> dict[str, Any]:
    """The source that has just been computed.

    Raises:
        SourceError: when it is not what it was, or not computed after all.
    """
    try:
        found: dict[str, Any] = (await call(engine, "find", **named))["source"]
    except SourceError:
        found = {}
    if found.get("id") != source_id:
        raise SourceError(
            409,
            "name",
            f"name={named['name']!r}: was deleted, or its ttl_s ended, before it was computed; "
            "post it again",
        )
    if not found["is_computed"]:
        raise SourceError(
            503, "name", f"name={named['name']!r}: its computation was aborted; post it again"
        )
    return found


def _from_header(salt: str | None) -> str | None:
    """The header's value as text: clients send UTF-8, servers read Latin-1."""
    try:
        return checked_salt(salt and salt.encode("latin-1").decode("utf-8"))
    except UnicodeError:
        return checked_salt(salt)


async def _list(request: Request, salt: Salt = None) -> JSONResponse:
    """The tenant's sources."""
    try:
        answer = await call(
            request.app.state.bounded_kv_engine, "list", cache_salt=_from_header(salt)
        )
    except SourceError as error:
        return refusal(error)
    return JSONResponse({"object": "list", **answer})


async def _show(name: str, request: Request, salt: Salt = None) -> JSONResponse:
    """One source of the tenant's."""
    return await _about("find", name, request, salt)


async def _delete(name: str, request: Request, salt: Salt = None) -> JSONResponse:
    """Let a source go. Running requests keep what they use."""
    return await _about("remove", name, request, salt)


async def _about(action: str, name: str, request: Request, salt: str | None) -> JSONResponse:
    engine = request.app.state.bounded_kv_engine
    try:
        answer = await call(engine, action, name=name, cache_salt=_from_header(salt))
    except SourceError as error:
        return refusal(error)
    return JSONResponse({**answer["source"], **({"deleted": True} if action == "remove" else {})})


async def _tokens(source: NewSource, request: Request) -> list[int]:
    """The source's tokens, as vLLM's own `/tokenize` makes them."""
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
    from vllm.entrypoints.serve.tokenize.protocol import (
        TokenizeChatRequest,
        TokenizeCompletionRequest,
    )

    if source.prompt_token_ids is not None:
        vocabulary = request.app.state.bounded_kv_engine.model_config.get_vocab_size()
        largest = max(source.prompt_token_ids)
        if largest >= vocabulary:
            raise SourceError(
                400,
                "prompt_token_ids",
                f"prompt_token_ids contain {largest}, but the model has {vocabulary} tokens",
            )
        return source.prompt_token_ids
    if source.prompt is not None:
        asked: Any = TokenizeCompletionRequest(
            prompt=source.prompt, add_special_tokens=source.add_special_tokens
        )
    else:
        messages: Any = source.messages
        try:
            asked = TokenizeChatRequest(messages=messages, add_generation_prompt=False)
        except ValidationError as error:
            first = error.errors()[0]
            raise SourceError(
                400, "messages", f"messages: {first['msg']} at {list(first['loc'])[1:]}"
            ) from error
    answer = await request.app.state.serving_tokenization.create_tokenize(asked, request)
    if isinstance(answer, ErrorResponse):
        raise SourceError(
            answer.error.code, answer.error.param or source.field, answer.error.message
        )
    tokens: list[int] = answer.tokens
    return tokens


async def _compute(engine: Any, token_ids: list[int], salt: str | None) -> None:
    """Let the model read the source, once on each replica; its blocks are pinned when the request
    ends."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    params = SamplingParams(
        max_tokens=1, temperature=0, extra_args={"kv_source_len": len(token_ids)}
    )
    prompt = tokens_input(token_ids, cache_salt=salt)

    async def read(index: int | None) -> None:
        request_id = f"kv-source-{uuid.uuid4()}"
        async for _ in engine.generate(prompt, params, request_id, data_parallel_rank=index):
            pass

    num_replicas = len(replicas.numbers(engine))
    # vLLM counts from the first that this server speaks to. A replica that has it, hits it.
    await asyncio.gather(*map(read, range(num_replicas) if num_replicas > 1 else [None]))
