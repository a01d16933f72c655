"""Streams that speak: utterances in, sound out, through vLLM and the codec's decoder.

A stream is one request of vLLM's, fed through its streaming input: the voice is its source, then
utterance follows utterance in the same slot. All streams' tokens are decoded together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from bounded_kv_speech.decode import StreamingDecoder
from bounded_kv_speech.durations import LONGEST
from bounded_kv_speech.frames import Floats
from bounded_kv_speech.tokens import END, FIRST_CODE, SPEECH
from bounded_kv_speech.turns import TooManyStreams, Turn, tokens_of

STEP_CODES = 8
"""Of a stream that are decoded at once, at most: all that a slow listener has left in vLLM would
make one step that all streams wait for, and take memory by its square."""
PACE_S = 0.05
"""Between steps, in which tokens gather: a step of some codes of each stream costs about as much as
one of one code. An utterance's first code does not wait."""


@dataclass(frozen=True)
class Sampling:
    """How the model's tokens are chosen."""

    temperature: float = 0.3
    top_k: int = 50
    seed: int | None = None
    """Of the choice and of the noise in the sound."""


@dataclass(frozen=True)
class Said:
    """Some of a stream's sound, and what it was made of."""

    samples: Floats = field(repr=False)
    """`[CODE_SAMPLES * codes]`; none where there are no codes among the tokens."""
    tokens: list[int] = field(repr=False)
    """Of one utterance, its `END` after its last."""


async def in_steps(pieces: AsyncIterable[list[int]]) -> AsyncGenerator[tuple[list[int], bool]]:
    """A stream's tokens as they are decoded, and whether a step can wait for others.

    A step has the tokens that there are, at most to an utterance's end.
    """
    is_first = True
    async for tokens in pieces:
        step, codes = list[int](), 0
        for i, token in enumerate(tokens, 1):
            step.append(token)
            codes += token >= FIRST_CODE
            is_full = codes == STEP_CODES
            if is_full or token == END or i == len(tokens):
                yield step, not (is_full or (is_first and codes))
                is_first = token == END or (is_first and not codes)
                step, codes = [], 0


def by_utterance(said: Iterable[Said]) -> list[list[int]]:
    """Tokens of each utterance, without its end; the last is the one that has not come to it."""
    found: list[list[int]] = [[]]
    for token in (token for each in said for token in each.tokens):
        if token == END:
            found.append([])
        else:
            found[-1].append(token)
    return found


class Speaker:
    """Any number of streams of one engine, up to the decoder's `max_streams` at a time."""

    def __init__(self, llm: AsyncLLM, decoder: StreamingDecoder) -> None:
        """Use as `async with`: decoding is a task of its own."""
        self._llm = llm
        self._decoding = _Decoding(decoder)

    async def __aenter__(self) -> Self:
        """Starts decoding."""
        self._decoding.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it."""
        await self._decoding.stop()

    async def speak(
        self,
        name: str,
        voice: Sequence[int],
        utterances: AsyncIterable[Sequence[int]],
        sampling: Sampling | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Said]:
        """The sound of `utterances`, in order, as it is made; each may come while others sound.

        `name` tells the stream from others that are open; `voice` is its source, `VOICE` first,
        and shared with streams of the same `cache_salt` alone.

        Raises:
            ValueError: a stream of this name is open.
            TooManyStreams: as many as there may be are open.
        """
        chosen = sampling or Sampling()
        await self._decoding.open(name, chosen.seed or 0)
        try:
            turns = _turns(voice, utterances, chosen)
            first = _params(chosen, len(voice), ())
            before = [SPEECH]  # what a prompt ends in; those of later utterances follow an END
            async with (
                aclosing(tokens_of(self._llm, name, first, turns, cache_salt)) as pieces,
                aclosing(in_steps(pieces)) as steps,
            ):
                async for tokens, can_wait in steps:
                    heard = before + [SPEECH if token == END else token for token in tokens]
                    before = []
                    yield Said(await self._decoding.decode(name, heard, can_wait), tokens)
        finally:
            await self._decoding.close(name)


async def _turns(
    voice: Sequence[int], utterances: AsyncIterable[Sequence[int]], sampling: Sampling
) -> AsyncGenerator[Turn]:
    before = list(voice)
    async for utterance in utterances:
        yield [*before, *utterance], _params(sampling, len(voice), utterance)
        before = []


def _params(sampling: Sampling, voice: int, utterance: Sequence[int]) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=(len(utterance) + 1) * (LONGEST + 1),
        stop_token_ids=[END],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_source_len": voice},
    )


@dataclass
class _Decoding:
    """Takes what all streams have at the moment as one step, beside the event loop."""

    streams: StreamingDecoder
    _task: asyncio.Task[None] | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of `streams`, which is not to change during a step."""
    _waiting: dict[str, tuple[list[int], asyncio.Future[Floats]]] = field(default_factory=dict)
    _some: asyncio.Event = field(default_factory=asyncio.Event)
    _at_once: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody's tokens cannot wait."""
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self) -> None:
        """Begin to decode."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Leave what is not decoded; who waits for it is cancelled."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for _, future in self._waiting.values():
            future.cancel()

    async def open(self, name: str, seed: int) -> None:
        """See `Speaker.speak`."""
        async with self._lock:
            self.streams.open(name, seed)
            most = self.streams.max_streams
            if (others := self.streams.num_open - 1) >= most:
                self.streams.close(name)
                raise TooManyStreams(f"stream {name!r}: {others} are open, of max_streams {most}")

    async def close(self, name: str) -> None:
        """End a stream, whatever it still waits for."""
        self._waiting.pop(name, None)
        closing = asyncio.create_task(self._close(name))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)  # who is cancelled here has closed all the same

    async def _close(self, name: str) -> None:
        async with self._lock:
            self.streams.close(name)

    async def decode(self, name: str, tokens: list[int], can_wait: bool) -> Floats:
        """Sound of a stream's next tokens; one call of a stream at a time."""
        if not tokens:
            return np.zeros(0, np.float32)
        future: asyncio.Future[Floats] = asyncio.get_running_loop().create_future()
        self._waiting[name] = tokens, future
        self._some.set()
        if not can_wait:
            self._at_once.set()
        return await future

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        last = clock() - PACE_S
        while True:
            await self._some.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(last + PACE_S):
                    await self._at_once.wait()
            self._some.clear()
            self._at_once.clear()
            last = clock()
            async with self._lock:
                taken, self._waiting = self._waiting, {}
                step = {name: tokens for name, (tokens, _) in taken.items()}
                try:
                    sound = await asyncio.to_thread(self.streams.step, step)
                except Exception as error:
                    for _, future in taken.values():
                        if not future.done():
                            future.set_exception(error)
                    continue
            for name, (_, future) in taken.items():
                if not future.done():
                    future.set_result(sound.get(name, np.zeros(0, np.float32)))
