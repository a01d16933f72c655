"""A stream of vLLM's that is told what to say in turns: one request, fed through its input."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt

Turn = tuple[Sequence[int], SamplingParams]
"""A prompt, and how it is answered; each but a stream's first goes on where the stream is."""
Piece = tuple[list[int], bool]
"""Tokens of one turn, and whether it ends with them."""
T = TypeVar("T")


class StreamFull(Exception):
    """A stream that is as long as the model's streams may be; nothing more can be said in it."""


class StreamAborted(RuntimeError):
    """The engine has ended a stream before its time: it ends itself."""


class TooManyStreams(RuntimeError):
    """As many streams as there may be at a time are open."""


async def tokens_of(
    engine: Any,
    name: str,
    first: SamplingParams,
    turns: AsyncIterable[Turn],
    cache_salt: str | None = None,
) -> AsyncGenerator[list[int]]:
    """The tokens of a stream, as they are made, each turn's to its end.

    Args:
        first: what vLLM checks before there is a turn.
        cache_salt: of the tenant: vLLM shares no block between salts.

    Raises:
        StreamFull: a turn has been cut off.
        StreamAborted: all have, by an engine that ends.
    """
    async with aclosing(pieces_of(engine, name, first, turns, cache_salt)) as parts:
        async for pieces in parts:
            yield [token for tokens, _ in pieces for token in tokens]


async def pieces_of(
    engine: Any,
    name: str,
    first: SamplingParams,
    turns: AsyncIterable[Turn],
    cache_salt: str | None = None,
) -> AsyncGenerator[list[Piece]]:
    """As `tokens_of`, split where turns end: with a token that stops one, or as long as it may be.

    vLLM says how a turn ended, but puts together what nobody has taken yet, and of that says only
    how the last did: so tokens are counted here.
    """
    open_turns: deque[SamplingParams] = deque()

    async def inputs() -> AsyncGenerator[StreamingInput]:
        async for tokens, params in turns:
            open_turns.append(params)
            prompt = TokensPrompt(prompt_token_ids=list(tokens))
            if cache_salt is not None:
                prompt["cache_salt"] = cache_salt
            yield StreamingInput(prompt, params)  # type: ignore[arg-type]  # vLLM takes both kinds

    count = 0
    async with aclosing(engine.generate(inputs(), first, name)) as outputs:
        async for output in outputs:
            for part in output.outputs:
                pieces, piece = list[Piece](), list[int]()
                for token in part.token_ids:
                    piece.append(token)
                    count += 1
                    if _ends(open_turns[0], token, count):
                        pieces.append((piece, True))
                        piece, count = [], 0
                        open_turns.popleft()
                yield [*pieces, (piece, False)] if piece else pieces
                if part.finish_reason == "abort":  # vLLM says no more of a stream of turns
                    raise StreamAborted(f"stream {name!r} was aborted")
                if part.finish_reason == "length" and count:
                    raise StreamFull(f"stream {name!r} is as long as one may be (max_model_len)")


def _ends(params: SamplingParams, token: int, count: int) -> bool:
    return token in (params.stop_token_ids or ()) or count == params.max_tokens


async def given(values: Iterable[T]) -> AsyncGenerator[T]:
    """What is known from the start, for who can wait for it."""
    for value in values:
        yield value
