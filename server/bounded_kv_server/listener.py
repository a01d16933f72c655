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
    _plays_from_s: float = 0.0
    _is_resting: bool = True

    def rest(self) -> None:
        """There is nothing to play for now: what comes next is played from a little after it on."""
        self._is_resting = True

    def receive(self, now_s: float, audio_s: float) -> None:
        """`audio_s` more of sound, at `now_s` since the request."""
        if audio_s <= 0:
            return
        if self.first_s is None:
            self.first_s = now_s
        spare = self._plays_from_s + self.silence_s + self.audio_s - now_s
        if self._is_resting:
            self._plays_from_s += max(0.0, START_BUFFER_S - spare)
            self._is_resting = False
        elif (late := -spare) > 0:
            self.underruns += 1
            self.silence_s += late
        self.audio_s += audio_s
