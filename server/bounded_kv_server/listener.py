"""What somebody hears who plays sound as it comes."""

from __future__ import annotations

from dataclasses import dataclass

START_BUFFER_S = 0.1
"""What a listener is taken to have before the first sound is played."""


@dataclass
class Listener:
    """Plays from a little after the first sound on; where nothing is left to play, that is an
    underrun."""

    first_s: float | None = None
    """When the first sound came."""
    audio_s: float = 0.0
    underruns: int = 0
    silence_s: float = 0.0
    """Of all underruns."""

    def receive(self, now_s: float, audio_s: float) -> None:
        """`audio_s` more of sound, at `now_s` since the request."""
        if audio_s <= 0:
            return
        if self.first_s is None:
            self.first_s = now_s
        late = now_s - self.first_s - START_BUFFER_S - self.silence_s - self.audio_s
        if late > 0:
            self.underruns += 1
            self.silence_s += late
        self.audio_s += audio_s
