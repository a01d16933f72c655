"""Sessions: one stream that is spoken to in turns, through vLLM's streaming input.

Each piece goes on where the last turn ended, in the same slot; the token that a turn sampled last
is not part of the stream (vLLM drops it). One oracle forward over the stream judges all turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from support.engine import LOGPROB_TOL
from support.oracle_llama import NEAR_TIE, OracleLlama, Rebase, bounded_mask
from support.tiny_llama import random_prompt

SINK, WINDOW, MAX_SOURCE, LIMIT = 5, 60, 64, 200


@dataclass
class Turn:
    piece: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    shown: dict[str, Any] = field(default_factory=dict)
    """The stream's figures at the end of the turn."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()


@pytest.fixture(scope="module")
def llm(tiny_model: Path, loop: asyncio.AbstractEventLoop) -> Iterator[AsyncLLM]:
    args = AsyncEngineArgs(
        model=str(tiny_model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=100_000,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        additional_config={
            "kv_plugin": "bounded",
            "bounded_kv": {
                "sink": SINK,
                "window": WINDOW,
                "max_source_len": MAX_SOURCE,
                "position_limit": LIMIT,
            },
        },
    )

    async def build() -> AsyncLLM:
        return AsyncLLM.from_engine_args(args)

    llm = loop.run_until_complete(build())
    yield llm
    llm.shutdown()


async def figures(llm: AsyncLLM) -> dict[str, Any]:
    shown: dict[str, Any] = await llm.engine_core.call_utility_async("bounded_kv_figures", False)
    return shown


async def talk(
    llm: AsyncLLM, name: str, pieces: list[list[int]], max_tokens: int, **args: int
) -> list[Turn]:
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=0,
        output_kind=RequestOutputKind.DELTA,
        extra_args=args or None,
    )
    turns: list[Turn] = []
    over: asyncio.Queue[None] = asyncio.Queue()

    async def spoken() -> AsyncGenerator[StreamingInput, None]:
        for piece in pieces:
            turns.append(Turn(piece))
            # vLLM extends the list that it is given.
            yield StreamingInput(TokensPrompt(prompt_token_ids=list(piece)), params)
            await over.get()

    async for output in llm.generate(spoken(), params, name):
        for said in output.outputs:
            turns[-1].tokens += said.token_ids
            turns[-1].logprobs += [
                row[token].logprob
                for row, token in zip(said.logprobs or [], said.token_ids, strict=True)
            ]
            if said.finish_reason is not None and not output.finished:
                (turns[-1].shown,) = (await figures(llm))["streams"][:1] or [{}]
                over.put_nowait(None)
    return turns


def expect_exact_turns(
    oracle: OracleLlama, turns: list[Turn], sink: int = SINK, window: int = WINDOW
) -> None:
    stream: list[int] = []
    starts = []
    for turn in turns:
        stream += turn.piece
        starts.append(len(stream))
        stream += turn.tokens[:-1]
    rebase = Rebase(sink, sink + window, LIMIT)
    table = oracle.logprobs(stream, bounded_mask(len(stream), sink, window), rebase=rebase)
    for number, (turn, start) in enumerate(zip(turns, starts, strict=True)):
        rows = table[start - 1 : start - 1 + len(turn.tokens)]
        chosen = rows.gather(1, torch.tensor(turn.tokens)[:, None]).squeeze(1)
        assert (rows.max(-1).values - chosen).max() <= NEAR_TIE, f"turn {number}"
        assert (chosen - torch.tensor(turn.logprobs)).abs().max() <= LOGPROB_TOL, f"turn {number}"


def pieces_of(*lengths: int) -> list[list[int]]:
    return [random_prompt(length, seed=100 + i) for i, length in enumerate(lengths)]


def test_forty_turns(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, oracle: OracleLlama) -> None:
    """Pieces shorter and longer than the window, across many boundaries, in one slot."""
    lengths = [(1, 9, 30, 70, 150)[i % 5] for i in range(40)]
    turns = loop.run_until_complete(talk(llm, "long", pieces_of(*lengths), 13))
    assert [len(turn.tokens) for turn in turns] == [13] * 40
    expect_exact_turns(oracle, turns)
    shown = [turn.shown for turn in turns[:-1]]
    assert {stream["blocks"] for stream in shown} == {-(-(SINK + WINDOW) // 32)}
    positions = [stream["position"] for stream in shown]
    assert positions == sorted(positions) and positions[-1] > 10 * LIMIT
    assert loop.run_until_complete(figures(llm))["slots_used"] == 0


def test_a_source_longer_than_the_first_piece(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, oracle: OracleLlama
) -> None:
    turns = loop.run_until_complete(
        talk(llm, "source", pieces_of(10, 20, 90, 200, 5), 20, kv_source_len=MAX_SOURCE)
    )
    expect_exact_turns(oracle, turns, sink=MAX_SOURCE)


def test_the_policy_is_pinned_at_the_start(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, oracle: OracleLlama
) -> None:
    params = {"kv_sink": 3, "kv_window": 20}
    turns = loop.run_until_complete(talk(llm, "pinned", pieces_of(50, 60, 300), 30, **params))
    expect_exact_turns(oracle, turns, 3, 20)


def test_a_refused_session_fails_alone(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, oracle: OracleLlama
) -> None:
    with pytest.raises(VLLMValidationError, match="kv_window=61: is beyond this server's limit 60"):
        loop.run_until_complete(talk(llm, "refused", pieces_of(5), 5, kv_window=WINDOW + 1))
    expect_exact_turns(oracle, loop.run_until_complete(talk(llm, "fine", pieces_of(5, 6), 5)))


def test_a_session_that_ends_while_the_engine_is_busy_gives_its_slot_back(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop
) -> None:
    """What ends it arrives before the engine has taken its only piece in."""

    async def hurried(name: str) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=3,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_source_len": MAX_SOURCE},
        )

        async def spoken() -> AsyncGenerator[StreamingInput, None]:
            yield StreamingInput(TokensPrompt(prompt_token_ids=random_prompt(70)), params)

        async for output in llm.generate(spoken(), params, name):
            assert all(said.finish_reason != "error" for said in output.outputs)

    async def crowd() -> None:
        busy = talk(llm, "busy", pieces_of(20_000), 2)
        await asyncio.gather(busy, *(hurried(f"hurried-{i}") for i in range(12)))

    loop.run_until_complete(crowd())
    assert loop.run_until_complete(figures(llm))["slots_used"] == 0


def test_sessions_beside_each_other(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, oracle: OracleLlama
) -> None:
    async def both() -> list[list[Turn]]:
        return list(
            await asyncio.gather(
                *(
                    talk(
                        llm, f"beside-{i}", pieces_of(*[20 + 45 * i] * 6), 25 + i, kv_window=60 - i
                    )
                    for i in range(4)
                )
            )
        )

    for i, turns in enumerate(loop.run_until_complete(both())):
        expect_exact_turns(oracle, turns, window=60 - i)
