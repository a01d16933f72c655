"""A stream of vLLM's that is told what to say in turns: one request, fed through its input."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt

Turn = tuple[Sequence[int], SamplingParams]
"""A prompt, and how it is answered; each but a stream's first goes on where the stream is."""
T = TypeVar("T")


async def tokens_of(
    engine: Any, name: str, first: SamplingParams, turns: AsyncIterable[Turn]
) -> AsyncGenerator[list[int]]:
    """The tokens of a stream, as they are made, each turn's to its end.

    Args:
        first: what vLLM checks before there is a turn.
    """

    async def pieces() -> AsyncGenerator[StreamingInput]:
        async for tokens, params in turns:
            prompt = TokensPrompt(prompt_token_ids=list(tokens))
            yield StreamingInput(prompt, params)  # type: ignore[arg-type]  # vLLM takes both kinds

    async with aclosing(engine.generate(pieces(), first, name)) as outputs:
        async for output in outputs:
            for part in output.outputs:
                yield list(part.token_ids)


async def given(values: Iterable[T]) -> AsyncGenerator[T]:
    """What is known from the start, for who can wait for it."""
    for value in values:
        yield value
