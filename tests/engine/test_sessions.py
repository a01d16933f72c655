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
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.tiny_llama import random_prompt
from support.async_engine import figures, running_llm, running_loop
from support.engine import LOGPROB_TOL
from support.oracle_llama import NEAR_TIE, OracleLlama, Rebase, bounded_mask
from vllm_bounded_kv.engine.compat import SESSIONS
from vllm_bounded_kv.engine.requests import open_sessions

SINK, WINDOW, MAX_SOURCE, LIMIT = 5, 60, 64, 200
MAX_SEQS = 4


@dataclass
class Turn:
    piece: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    shown: dict[str, Any] = field(default_factory=dict)
    """The stream's figures at the end of the turn."""
    pool_blocks_free: int = 0


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with running_loop() as loop:
        yield loop


@pytest.fixture(scope="module")
def llm(tiny_model: Path, loop: asyncio.AbstractEventLoop) -> Iterator[AsyncLLM]:
    args = AsyncEngineArgs(
        model=str(tiny_model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=100_000,
        max_num_seqs=MAX_SEQS,
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
    with running_llm(loop, args) as llm:
        yield llm


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
                now = await figures(llm)
                (turns[-1].shown,) = now["streams"][:1] or [{}]
                turns[-1].pool_blocks_free = now["pool_blocks_free"]
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


def test_a_thousand_turns(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, oracle: OracleLlama
) -> None:
    """What the device holds is the same after each of them."""
    pieces = [random_prompt(1 + i % 4, seed=i) for i in range(1000)]
    turns = loop.run_until_complete(talk(llm, "thousand", pieces, 2))
    assert [len(turn.tokens) for turn in turns] == [2] * 1000
    expect_exact_turns(oracle, turns)
    shown = [turn.shown for turn in turns[:-1]]
    assert {stream["blocks"] for stream in shown} == {-(-(SINK + WINDOW) // 32)}
    assert {turn.pool_blocks_free for turn in turns[:-1]} == {turns[0].pool_blocks_free}


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


# --- limits


def limits(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Other limits for the sessions of the shared engine."""
    sessions = open_sessions(llm.vllm_config)
    assert sessions is not None and len(sessions) == 0
    for name, value in values.items():
        monkeypatch.setattr(sessions, name, value)
    monkeypatch.setattr(llm, SESSIONS, sessions, raising=False)


class Silent:
    """A session that says one piece and then nothing."""

    def __init__(self, llm: AsyncLLM, name: str) -> None:
        self.answered = asyncio.Event()
        self.is_closed = False
        self.num_tokens = 0
        self.task = asyncio.ensure_future(self._talk(llm, name))

    async def _talk(self, llm: AsyncLLM, name: str) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )

        async def spoken() -> AsyncGenerator[StreamingInput, None]:
            try:
                yield StreamingInput(TokensPrompt(prompt_token_ids=random_prompt(9)), params)
                await asyncio.Event().wait()
            finally:
                self.is_closed = True

        async for output in llm.generate(spoken(), params, name):
            for said in output.outputs:
                self.num_tokens += len(said.token_ids)
                if said.finish_reason is not None:
                    self.answered.set()


def test_idle_sessions_do_not_hold_every_slot(
    llm: AsyncLLM,
    loop: asyncio.AbstractEventLoop,
    oracle: OracleLlama,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many silent ones as there are slots end by themselves; one that waits then gets in."""
    limits(llm, monkeypatch, idle_s=1.0)

    async def wait() -> list[Turn]:
        silent = [Silent(llm, f"silent-{i}") for i in range(MAX_SEQS)]
        for session in silent:
            await session.answered.wait()
        assert (await figures(llm))["slots_used"] == MAX_SEQS
        turns = await talk(llm, "waiting", pieces_of(5, 70), 9)
        for session in silent:
            await session.task
            assert session.is_closed and session.num_tokens == 4
        return turns

    expect_exact_turns(oracle, loop.run_until_complete(asyncio.wait_for(wait(), 60)))
    assert loop.run_until_complete(figures(llm))["slots_used"] == 0


def test_one_session_too_many(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(llm, monkeypatch, max_sessions=2)

    async def crowd() -> None:
        first, second = Silent(llm, "first"), Silent(llm, "second")
        await first.answered.wait()
        await second.answered.wait()
        third = Silent(llm, "third")
        await first.task
        await third.answered.wait()
        assert not second.task.done() and first.num_tokens == third.num_tokens == 4
        busy = [asyncio.ensure_future(talk(llm, f"busy-{i}", pieces_of(20_000), 2)) for i in "ab"]
        await second.task
        await third.task
        with pytest.raises(GracefulHTTPError, match="--bounded-kv-max-sessions=2") as refused:
            await talk(llm, "refused", pieces_of(5), 5)
        assert refused.value.http_status == 429
        await asyncio.gather(*busy)

    loop.run_until_complete(asyncio.wait_for(crowd(), 120))
    assert loop.run_until_complete(figures(llm))["slots_used"] == 0
    assert len(getattr(llm, SESSIONS)) == 0
