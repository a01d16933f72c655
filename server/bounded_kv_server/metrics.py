"""Prometheus metrics of the speech server, `bounded_kv_speech_*`, on vLLM's own `/metrics`."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field

from prometheus_client import Counter, Gauge, Histogram

from bounded_kv_server.listener import START_BUFFER_S, Listener

OUTCOMES = ("ok", "refused", "failed", "broken", "left", "expired")
"""`broken`: failed after its first sound; `left`: its client did; `expired`: a socket that was
idle, or open as long as may be."""
SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30)
FACTORS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 4)


@dataclass(frozen=True)
class _Metrics:
    requests: Counter
    first_audio: Histogram
    real_time_factor: Histogram
    underrun: Histogram
    audio_seconds: Counter
    active: Gauge
    waiting: Gauge
    voices: Gauge
    encoder_errors: Counter


@functools.cache
def metrics() -> _Metrics:
    """Created on first use: a server that does not speak shows none of them."""
    name = "bounded_kv_speech_"
    made = _Metrics(
        Counter(f"{name}requests", "Requests for speech, by outcome.", ["outcome"]),
        Histogram(f"{name}first_audio_seconds", "To the first sound.", buckets=SECONDS),
        Histogram(f"{name}real_time_factor", "Time over sound, by response.", buckets=FACTORS),
        Histogram(
            f"{name}underrun_seconds",
            f"Silence that a listener with a buffer of {START_BUFFER_S} s heard, by response.",
            buckets=(0.0, *SECONDS),
        ),
        Counter(f"{name}audio_seconds", "Sound made."),
        Gauge(f"{name}active_streams", "Streams that sound.", multiprocess_mode="livesum"),
        Gauge(f"{name}waiting", "Requests that wait for a place.", multiprocess_mode="livesum"),
        Gauge(f"{name}voices", "Voices, uploaded ones included.", multiprocess_mode="mostrecent"),
        Counter(f"{name}encoder_errors", "Responses whose encoder failed."),
    )
    for outcome in OUTCOMES:
        made.requests.labels(outcome)
    return made


@dataclass
class Clock(Listener):
    """One response, from its request on; it stands still while a socket has nothing to say."""

    start: float = field(default_factory=time.perf_counter)
    _rests_since: float | None = None
    _rested_s: float = 0.0
    _rested_first_s: float = 0.0
    """Before the first sound."""

    def rest(self) -> None:
        """All has been said."""
        super().rest()
        if self._rests_since is None:
            self._rests_since = time.perf_counter()

    def work(self) -> None:
        """There is something to say."""
        if self._rests_since is not None:
            self._rested_s += time.perf_counter() - self._rests_since
            self._rests_since = None

    def heard(self, audio_s: float) -> None:
        """`audio_s` more of sound has been made."""
        if self.first_s is None:
            self._rested_first_s = self._rested_s
        self.receive(time.perf_counter() - self.start, audio_s)

    def close(self, outcome: str) -> None:
        """The response is over."""
        self.work()
        shown = metrics()
        shown.requests.labels(outcome).inc()
        shown.audio_seconds.inc(self.audio_s)
        if self.first_s is not None:
            shown.first_audio.observe(self.first_s - self._rested_first_s)
            took = time.perf_counter() - self.start - self._rested_s
            shown.real_time_factor.observe(took / max(self.audio_s, 1e-9))
            shown.underrun.observe(self.silence_s)
