"""`vllm_xargs: {"kv_source": NAME}`: a request begins with a pinned source.

Names are known to the engine core, so they are looked up before vLLM's handlers run, while a
refusal can still be a status. The tokens wait in the request's context until vLLM has rendered the
prompt. What vLLM's parsing would hide from the policy is refused here as well: a boolean, which it
takes for a number, and beam search, which drops the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm_bounded_kv import metrics
from vllm_bounded_kv.engine.policy import SOURCE_KEY, PolicyError
from vllm_bounded_kv.engine.source_routes import call, checked_salt, refusal
from vllm_bounded_kv.engine.sources import SourceError


@dataclass(frozen=True)
class NamedSource:
    """A source that this HTTP request has named."""

    name: str
    token_ids: list[int]


_named: ContextVar[NamedSource | None] = ContextVar("bounded_kv_named_source", default=None)


class NamedSourceMiddleware:
    """Looks up the source that a request's JSON body names (ASGI)."""

    def __init__(self, app: Callable[..., Any], get_engine: Callable[[], Any]) -> None:
        self.app = app
        self.get_engine = get_engine

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the body, look the name up, hand the body on."""
        if scope["type"] != "http" or scope["method"] != "POST" or not _is_json(scope):
            await self.app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        token = None
        try:
            if b'"kv_' in body or b"\\u" in body:  # JSON may write any letter by its number
                token = _named.set(await self._look_up(body))
            await self.app(scope, again, send)
        except SourceError as error:
            if error.field is not None:
                metrics.count_refusal(error.field)
            await refusal(error)(scope, receive, send)
        finally:
            if token is not None:
                _named.reset(token)

    async def _look_up(self, body: bytes) -> NamedSource | None:
        try:
            asked = json.loads(body)
            args = asked["vllm_xargs"]
            given = {name: args[name] for name in args if name.startswith("kv_")}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None  # no request with arguments: for vLLM to answer
        for field, value in given.items():
            if isinstance(value, bool) and field != SOURCE_KEY:
                raise SourceError(400, field, f"{field}={value!r}: must be an integer, got bool")
            if asked.get("use_beam_search"):
                raise SourceError(400, field, f"{field}={value!r}: not with use_beam_search")
        if SOURCE_KEY not in given:
            return None
        name = given[SOURCE_KEY]
        if not isinstance(name, str):
            raise SourceError(400, SOURCE_KEY, f"{SOURCE_KEY}={name!r}: must be a name")
        if "kv_source_len" in args:
            raise SourceError(
                400,
                SOURCE_KEY,
                f"{SOURCE_KEY}={name!r}: comes with its own kv_source_len; leave that out",
            )
        salt = checked_salt(asked.get("cache_salt"))
        if asked.get("echo"):
            raise SourceError(400, SOURCE_KEY, f"{SOURCE_KEY}={name!r}: not with echo")
        found = await call(self.get_engine(), "find", name=name, cache_salt=salt, field=SOURCE_KEY)
        return NamedSource(name, found["token_ids"])


def _is_json(scope: Any) -> bool:
    """Whether the request says so; vLLM takes nothing else where arguments can be given."""
    return any(name == b"content-type" and b"json" in value for name, value in scope["headers"])


def with_named_source(prompt: Any, params: Any, max_model_len: int) -> tuple[Any, Any]:
    """Prompt and params of a request, the source it names put in front.

    Args:
        prompt: rendered by vLLM: a mapping with `prompt_token_ids`.
        params: `SamplingParams`.
        max_model_len: tokens that a stream may have.

    Returns:
        Both as they came, where no source is named.

    Raises:
        PolicyError: when the source cannot be put in front of such a prompt.
    """
    args = getattr(params, "extra_args", None) or {}
    if SOURCE_KEY not in args:
        return prompt, params
    source = _named.get()
    if source is None or source.name != args[SOURCE_KEY]:
        return prompt, params  # which the policy refuses, with a remedy
    if not isinstance(prompt, Mapping) or prompt.get("type") != "token":
        raise PolicyError(SOURCE_KEY, source.name, "only prompts of text or tokens can follow it")
    length = len(source.token_ids) + len(prompt["prompt_token_ids"])
    if length >= max_model_len:
        raise PolicyError(
            SOURCE_KEY,
            source.name,
            f"source and prompt have {length} tokens, and max_model_len={max_model_len} leaves no "
            "room for an answer",
        )
    kept = {k: v for k, v in prompt.items() if k not in ("prompt", "prompt_token_offsets")}
    prompt = {**kept, "prompt_token_ids": [*source.token_ids, *prompt["prompt_token_ids"]]}
    params = params.clone()
    params.extra_args = {k: v for k, v in args.items() if k != SOURCE_KEY}
    params.extra_args["kv_source_len"] = len(source.token_ids)
    return prompt, params
