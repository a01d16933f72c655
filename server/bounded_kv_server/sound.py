"""From a checked request to encoded sound, as it is made.

One generator is a response's whole life: its place among those that sound, its stream in the
engine, its encoder. Closing it frees all three, whenever that is.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from bounded_kv_server.encoded import Encoded
from bounded_kv_server.encoding import Encoder
from bounded_kv_server.errors import SpeechError
from bounded_kv_server.metrics import Clock
from bounded_kv_server.profile import Chosen
from bounded_kv_server.server import SpeechServer
from bounded_kv_speech.turns import given


@dataclass(frozen=True)
class Ask:
    """What is said, and how, checked."""

    utterances: list[list[int]]
    voice: list[int]
    chosen: Chosen
    format: str
    speed: float
    max_duration_s: float | None
    name: str = field(default_factory=lambda: f"speech-{uuid.uuid4()}")
    """Of its stream: in the engine, vLLM adds an end of its own."""

    @property
    def longest(self) -> int:
        """Tokens that are to be said."""
        return sum(map(len, self.utterances))


@dataclass(frozen=True)
class Sent:
    """Some encoded sound; there may be none."""

    data: bytes
    num_tokens: int


async def encoded(server: SpeechServer, ask: Ask, clock: Clock) -> AsyncGenerator[Sent]:
    """The sound of `ask`, in its format.

    Raises:
        SpeechError: no place, or more sound than was asked for, or less than there is to say.
    """
    model = server.speaking()
    assert server.voices is not None
    limit = _limit(server, ask)
    encoder = Encoder(ask.format, model.rate, ask.speed)
    async with Encoded(server.threads, encoder) as encoding, server.gate.place():
        await server.voices.pin(ask.voice, ask.chosen.cache_salt)
        stream = model.speak(ask.name, ask.voice, given(ask.utterances), ask.chosen)
        async with aclosing(stream):
            made = ended = 0
            async for chunk in stream:
                made += len(chunk.samples)
                ended += chunk.num_ended
                if made > limit.seconds * ask.speed * model.rate:
                    raise limit.error
                data = await encoding.encode(chunk.samples) if len(chunk.samples) else b""
                clock.heard(len(chunk.samples) / model.rate / ask.speed)
                yield Sent(data, chunk.num_tokens)
        if ended < len(ask.utterances) or not made:
            raise SpeechError(
                500,
                "input",
                f"the model said {ended} of {len(ask.utterances)} utterances",
            )
        yield Sent(await encoding.finish(), 0)


@dataclass(frozen=True)
class _Limit:
    """Seconds of sound, as it is heard, and what is raised beyond."""

    seconds: float
    error: SpeechError


def _limit(server: SpeechServer, ask: Ask) -> _Limit:
    """What was asked, or what the text can take at most."""
    at_most = server.speaking().longest_s * (ask.longest + 1) / ask.speed
    if ask.max_duration_s is None or ask.max_duration_s > at_most:
        said = f"the model has said more than {at_most:g} s, which is all that the text can take"
        return _Limit(at_most, SpeechError(500, "input", said))
    asked = ask.max_duration_s
    said = (
        f"there is more to say than {asked:g} s of sound; allow more (max_duration_s), or say less"
    )
    return _Limit(asked, SpeechError(400, "max_duration_s", said))
