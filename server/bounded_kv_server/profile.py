"""A speech profile: how a served language model's tokens become sound.

Third parties add theirs as entry points of the group `bounded_kv_server.profiles`: a `Profile` by
its name. A model says in its `config.json` which is its own: `"bounded_kv_speech": {"profile":
NAME}`; `--speech-profile NAME` says it for a model that does not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bounded_kv_server.settings import SpeechSettings

Floats = NDArray[np.float32]
GROUP = "bounded_kv_server.profiles"


@dataclass(frozen=True)
class Chosen:
    """How tokens are chosen (`None`: as the profile has it by default), and for whom."""

    temperature: float | None = None
    seed: int | None = None
    cache_salt: str | None = None
    """Of the tenant: the stream shares nothing with those of another, its voice neither."""


@dataclass(frozen=True)
class Chunk:
    """Some sound."""

    samples: Floats
    """`[N]`, at the model's rate; there may be none."""
    num_tokens: int
    """That it was made of."""
    num_ended: int
    """Utterances that end in it."""


class SpeechModel(Protocol):
    """A served model that speaks. Its sound is mono.

    An utterance is what the model is given at once, a sentence say, as tokens of a prompt.
    """

    rate: int
    """Samples a second."""
    longest_s: float
    """What one token of an utterance can take at most, in seconds of sound: bounds the whole."""
    voices: Mapping[str, Sequence[int]]
    """Those that come with it, the first being that of who names none: tokens of their sources."""
    takes_instructions: bool
    voice_kind: str
    """What codes of voices are made by and for, as the name of a folder: those of another codec are
    none of this one's."""

    def utterances(self, text: str) -> list[list[int]]:
        """What there is to say in a text; takes milliseconds, on any thread."""
        ...

    def voice_of(self, samples: Floats) -> NDArray[np.int64]:
        """Codes of a voice, of a sample `[N]` of it at `rate`; on any thread.

        Raises:
            ValueError: the sample will not do, or the model takes none.
        """
        ...

    def source_of(self, codes: NDArray[np.int64]) -> list[int]:
        """Tokens of a voice's source."""
        ...

    def speak(
        self,
        name: str,
        voice: Sequence[int],
        utterances: AsyncIterable[Sequence[int]],
        chosen: Chosen,
    ) -> AsyncGenerator[Chunk]:
        """The sound of utterances, as it is made, in one stream called `name`.

        Closing the generator ends the stream and frees what it held.
        """
        ...

    async def start(self) -> None:
        """Make ready to speak; called once, on the event loop that will be used."""
        ...


class Profile(Protocol):
    """What an entry point of `GROUP` names."""

    logits_processors: Sequence[str]
    """For vLLM, as `module:class`."""

    def load(self, engine_client: Any, settings: SpeechSettings) -> SpeechModel:
        """The model that `engine_client` serves.

        Raises:
            OSError, ValueError: what belongs to the model is not there or not as it must be.
        """
        ...


def names() -> list[str]:
    """Of all profiles that are installed."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def find(name: str) -> Profile:
    """The profile of this name.

    Raises:
        ValueError: there is none.
    """
    for entry in entry_points(group=GROUP, name=name):
        found: Profile = entry.load()
        return found
    raise ValueError(f"--speech-profile {name}: unknown; known: {', '.join(names())}")
