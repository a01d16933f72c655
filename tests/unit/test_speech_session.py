"""A socket's limits and order, by a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bounded_kv_server.metrics import metrics
from bounded_kv_server.profile import Chosen, Chunk
from support.sounds import samples_of
from support.speech_line import Line, run, speech_server, talking, until
from support.tones import CHUNK, RATE, WORD_CHUNKS, Tones

WORD_S = WORD_CHUNKS * CHUNK / RATE
REAL_TIME = CHUNK / RATE


class Eager(Tones):
    """Takes utterances as vLLM does: whatever there is, at once."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.num_taken = self.num_ended = 0
        self.held: list[int] = []
        """Utterances that it had when one ended, with that one."""

    async def speak(
        self,
        name: str,
        voice: Sequence[int],
        utterances: AsyncIterable[Sequence[int]],
        chosen: Chosen,
    ) -> AsyncGenerator[Chunk]:
        queue: asyncio.Queue[Sequence[int] | None] = asyncio.Queue()

        async def take() -> None:
            async for utterance in utterances:
                self.num_taken += 1
                queue.put_nowait(utterance)
            queue.put_nowait(None)

        async def taken() -> AsyncGenerator[Sequence[int]]:
            while (utterance := await queue.get()) is not None:
                yield utterance

        taking = asyncio.create_task(take())
        try:
            async with aclosing(super().speak(name, voice, taken(), chosen)) as sound:
                async for chunk in sound:
                    if chunk.num_ended:
                        self.held.append(self.num_taken - self.num_ended)
                        self.num_ended += chunk.num_ended
                    yield chunk
        finally:
            taking.cancel()


def outcomes(name: str) -> float:
    return metrics().requests.labels(name)._value.get()


def test_the_engine_has_the_next_utterance_and_no_more(tmp_path: Path) -> None:
    async def test() -> None:
        model = Eager(chunk_s=0.01)
        async with talking(speech_server(model, tmp_path)) as (line, _):
            line.say("input.text", text="One. Two two. Three. Four four four. Five. Six. ")
            line.say("session.close")
            await line.hear("session.closed")
        assert model.held == [2, 2, 2, 2, 2, 1]

    run(test())


def test_what_waits_has_a_limit(tmp_path: Path) -> None:
    async def test() -> None:
        model = Eager(chunk_s=1.0)
        async with talking(speech_server(model, tmp_path, max_speech_input=40)) as (line, task):
            for _ in range(10):
                line.say("input.text", text="a b c d e f g h i j. ")
                line.say("input.text", text="k l m n o p q r s t. ")
                await asyncio.sleep(0.1)
            assert not task.done()
            for _ in range(7):
                line.say("input.text", text="a b c d e f g h i j k l m n o p q r. ")
            await task
            assert "at most 320 may (8 times --max-speech-input)" in line.error

    run(test())


def test_what_is_sent_ahead_of_a_place_has_a_limit(tmp_path: Path) -> None:
    async def test() -> None:
        server = speech_server(Tones(chunk_s=0.1), tmp_path, max_speech_input=40)
        server.gate = type(server.gate)(1, 4)
        async with talking(server) as (first, _), talking(server) as (second, task):
            first.say("input.text", text="forever. ")
            await until(lambda: server.gate.num_waiting == 1)
            for _ in range(11):
                second.say("input.text", text="a" * 30)
            await task
            assert "wait for session.ready" in second.error

    run(test())


def test_who_leaves_while_waiting_gives_its_turn_up(tmp_path: Path) -> None:
    async def test() -> None:
        server = speech_server(Tones(chunk_s=0.1), tmp_path)
        server.gate = type(server.gate)(1, 4)
        async with talking(server) as (first, _), talking(server) as (second, task):
            first.say("input.text", text="forever. ")
            second.say("input.text", text="Some words. ")
            await until(lambda: server.gate.num_waiting == 1)
            before = outcomes("left")
            second.leave()
            await task
            assert (server.gate.num_active, server.gate.num_waiting) == (1, 0)
            assert outcomes("left") == before + 1

    run(test())


def test_who_leaves_after_the_last_word_is_noticed(tmp_path: Path) -> None:
    async def test() -> None:
        model = Tones(chunk_s=0.1, pause_s=100.0)
        async with talking(speech_server(model, tmp_path)) as (line, task):
            line.say("input.text", text="a pause b.")
            line.say("session.close")
            await line.hear("sound")
            line.leave()
            async with asyncio.timeout(1.0):
                await task
        assert model.num_open == 0

    run(test())


def test_who_does_not_read_loses_its_place(tmp_path: Path) -> None:
    async def test() -> None:
        server = speech_server(Tones(chunk_s=0.1), tmp_path, speech_idle_s=5.0)
        before = outcomes("left")
        async with talking(server) as (line, task):
            line.say("input.text", text="forever. ")
            await line.hear("sound")
            line.reads.clear()
            async with asyncio.timeout(6.0):
                await task
            assert server.gate.num_active == 0
        assert outcomes("left") == before + 1

    run(test())


@pytest.mark.parametrize("text", ["", " ", "...", "\n\n"])
def test_messages_without_words_do_not_keep_a_place(tmp_path: Path, text: str) -> None:
    async def test() -> None:
        before = outcomes("expired")
        async with talking(speech_server(Tones(), tmp_path, speech_idle_s=5.0)) as (line, task):
            while not task.done():
                line.say("input.text", text=text)
                line.say("input.done")
                await asyncio.sleep(1.0)
                assert asyncio.get_running_loop().time() < 10.0
            assert "--speech-idle-s" in line.error
        assert outcomes("expired") == before + 1

    run(test())


def test_idle_counts_from_the_last_sound(tmp_path: Path) -> None:
    async def test() -> None:
        server = speech_server(Tones(chunk_s=0.1), tmp_path, speech_idle_s=5.0)
        async with talking(server) as (line, task):
            line.say("input.text", text="a " * 18 + ". ")
            await task
            assert line.at["sound"] == pytest.approx(0.1 * WORD_CHUNKS * 18, abs=0.1)
            assert line.at["error"] == pytest.approx(line.at["sound"] + 5.0, abs=0.1)

    run(test())


def test_a_stream_without_sound_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    async def test() -> None:
        server = speech_server(Tones(pause_s=100.0), tmp_path, speech_idle_s=5.0)
        async with talking(server) as (line, task):
            line.say("input.text", text="a pause b. ")
            await task
            assert line.at["error"] == pytest.approx(5.0, abs=0.1)
            assert line.error == "no sound has come for 5 s"

    run(test())


@pytest.mark.parametrize("text", ["one two. ", "", "half a sentence"])
def test_a_server_that_ends_says_what_it_was_given_and_closes(tmp_path: Path, text: str) -> None:
    async def test() -> None:
        server = speech_server(Tones(chunk_s=REAL_TIME), tmp_path)
        async with talking(server) as (line, task):
            await line.hear("session.ready")
            line.say("input.text", text=text)
            await asyncio.sleep(0.05)
            server.ending.set()
            async with asyncio.timeout(10.0):
                await task
        assert line.error == "" and line.told[-1]["type"] == "session.closed"
        words = len(text.split())
        assert sum(map(len, line.sound)) == 2 * words * WORD_CHUNKS * CHUNK
        assert server.gate.num_active == 0

    run(test())


def test_a_server_that_ends_takes_no_more_sockets(tmp_path: Path) -> None:
    async def test() -> None:
        server = speech_server(Tones(), tmp_path)
        server.ending.set()
        line = Line(server)
        async with asyncio.timeout(10.0):
            await line()
        assert "shutting down" in line.error

    run(test())


def test_a_socket_has_an_end(tmp_path: Path) -> None:
    async def test() -> None:
        before = outcomes("expired")
        server = speech_server(Tones(chunk_s=0.1), tmp_path, max_session_s=50.0)
        async with talking(server) as (line, task):
            line.say("input.text", text="forever. ")
            await task
            assert line.at["error"] == pytest.approx(50.0, abs=0.5)
            assert "--max-session-s" in line.error
            assert server.gate.num_active == 0
        assert outcomes("expired") == before + 1

    run(test())


async def barge_in(line: Line, model: Tones) -> None:
    """Clear while something that was encoded waits to be sent; say another thing."""
    line.say("input.text", text="forever. ")
    await line.hear("sound")
    line.reads.clear()
    await asyncio.sleep(1.0)
    line.say("input.clear")
    await asyncio.sleep(1.0)
    assert "input.cleared" not in line.at
    line.reads.set()
    await line.hear("input.cleared")
    line.say("input.text", text="Two words.")
    line.say("session.close")
    await line.hear("session.closed")


@pytest.mark.parametrize("format", ["pcm", "flac", "opus"])
def test_a_file_lacks_nothing_that_was_encoded_when_it_is_cleared(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bounded_kv_server.encoding import Encoder

    given: list[np.ndarray] = []
    encode = Encoder.encode

    def counted(encoder: Encoder, samples: Any) -> bytes:
        given.append(samples)
        return encode(encoder, samples)

    async def test() -> None:
        model = Tones(chunk_s=0.01)
        async with talking(speech_server(model, tmp_path), response_format=format) as (line, _):
            await barge_in(line, model)
        whole = np.concatenate(given)
        heard = samples_of(b"".join(line.sound), format) / 32767
        assert abs(len(heard) - len(whole)) <= (0 if format != "opus" else 1)
        if format != "opus":
            assert np.abs(heard - whole).max() < 1e-3

    monkeypatch.setattr(Encoder, "encode", counted)
    run(test())


def test_what_was_cleared_counts_for_nothing(tmp_path: Path) -> None:
    """What was said before it ends no later utterance."""

    async def test() -> None:
        model = Eager(chunk_s=0.01)
        async with talking(speech_server(model, tmp_path)) as (line, _):
            for _ in range(20):
                line.say("input.text", text="One. Two. Three. ")
                line.say("input.done")
                await asyncio.sleep(0.05)
                line.say("input.clear")
                line.at.pop("input.cleared", None)
                await line.hear("input.cleared")
                line.at.pop("speech.done", None)
                line.sound.clear()
                line.say("input.text", text="Four. Five.")
                line.say("input.done")
                await line.hear("speech.done")
                samples = len(b"".join(line.sound)) // 2
                assert samples == 2 * WORD_CHUNKS * CHUNK

    run(test())


def test_text_before_a_clear_is_not_worked_out(tmp_path: Path) -> None:
    class Slow(Tones):
        asked = 0

        def utterances(self, text: str) -> list[list[int]]:
            self.asked += 1
            return super().utterances(text)

    async def test() -> None:
        model = Slow(chunk_s=0.01)
        async with talking(speech_server(model, tmp_path)) as (line, _):
            await line.hear("session.ready")
            line.say("input.text", text="Never said. " * 100)
            line.say("input.clear")
            line.say("input.text", text="Said.")
            line.say("session.close")
            await line.hear("session.closed")
            assert model.asked < 10
            assert len(b"".join(line.sound)) // 2 <= (WORD_CHUNKS + 2) * CHUNK

    run(test())
