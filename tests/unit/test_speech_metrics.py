"""What is counted of a response, and of a socket that has pauses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bounded_kv_server import metrics as module
from bounded_kv_server.listener import START_BUFFER_S, Listener
from bounded_kv_server.metrics import Clock, metrics

NAMES = ("first_audio", "real_time_factor", "underrun")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def sums() -> list[float]:
    return [getattr(metrics(), name)._sum.get() for name in NAMES]


def test_a_listener_hears_silence_where_sound_is_late() -> None:
    listener = Listener()
    listener.receive(5.0, 1.0)
    listener.receive(6.0 + START_BUFFER_S, 1.0)
    assert (listener.first_s, listener.underruns) == (5.0, 0)
    listener.receive(7.5 + START_BUFFER_S, 1.0)
    assert (listener.underruns, listener.silence_s) == (1, pytest.approx(0.5))


def test_a_pause_is_no_silence() -> None:
    listener = Listener()
    listener.receive(0.0, 1.0)
    listener.rest()
    listener.receive(50.0, 1.0)
    listener.receive(51.0 + START_BUFFER_S, 1.0)
    assert listener.underruns == 0
    listener.receive(52.5 + START_BUFFER_S, 1.0)
    assert listener.silence_s == pytest.approx(0.5)


def test_what_is_not_yet_played_outlasts_a_pause() -> None:
    listener = Listener()
    listener.receive(0.0, 10.0)
    listener.rest()
    listener.receive(1.0, 1.0)
    listener.receive(11.0 + START_BUFFER_S, 1.0)
    assert listener.underruns == 0
    listener.receive(12.5 + START_BUFFER_S, 1.0)
    assert listener.silence_s == pytest.approx(0.5)


def test_a_socket_is_measured_while_it_has_something_to_say(now: SimpleNamespace) -> None:
    before, clock = sums(), Clock(start=now.s)
    now.s += 1.0  # for a place
    clock.rest()
    for _ in range(3):
        now.s += 1000.0
        clock.work()
        now.s += 0.5
        clock.heard(2.0)
        clock.rest()
        clock.rest()
    now.s += 1000.0
    clock.close("ok")
    found = [after - earlier for after, earlier in zip(sums(), before, strict=True)]
    assert found == pytest.approx([1.5, 2.5 / 6.0, 0.0])


def test_a_response_is_measured_from_its_request_on(now: SimpleNamespace) -> None:
    before, clock = sums(), Clock(start=now.s)
    now.s += 0.5
    clock.heard(1.0)
    now.s += 1.5
    clock.heard(1.0)
    clock.close("ok")
    found = [after - earlier for after, earlier in zip(sums(), before, strict=True)]
    assert found == pytest.approx([0.5, 1.0, 0.4])
