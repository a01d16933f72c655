"""A stream of vLLM's that is told what to say in turns: one request, fed through its input."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt


async def tokens_of(
    engine: Any,
    name: str,
    turns: AsyncIterable[Sequence[int]],
    params_of: Callable[[int], SamplingParams],
) -> AsyncGenerator[list[int]]:
    """The tokens of a stream, as they are made, each turn's to its end.

    Args:
        turns: prompts; each but the first goes on where the stream is.
        params_of: of a turn with so many tokens.
    """

    async def pieces() -> AsyncGenerator[StreamingInput]:
        async for turn in turns:
            prompt = TokensPrompt(prompt_token_ids=list(turn))
            yield StreamingInput(prompt, params_of(len(turn)))  # type: ignore[arg-type]

    async for output in engine.generate(pieces(), params_of(0), name):
        for part in output.outputs:
            yield list(part.token_ids)
