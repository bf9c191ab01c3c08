"""Throttled work pauses while there are requests, and nothing else does."""

from __future__ import annotations

import threading

import pytest

from services.api.serving.engines import throttle


class Clock:
    """A clock that sleeping advances."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throttle, "time", clock)
    return clock


def test_it_pauses_as_long_as_it_worked_but_half_a_second_at_most(clock: Clock) -> None:
    with throttle.throttled(lambda: True):
        clock.now += 0.25
        throttle.yield_to_requests()
        clock.now += 0.125
        throttle.yield_to_requests()
        clock.now += 60
        throttle.yield_to_requests()
    assert clock.slept == [0.25, 0.125, 0.5]


def test_it_does_not_pause_without_requests(clock: Clock) -> None:
    has_requests = False
    with throttle.throttled(lambda: has_requests):
        clock.now += 0.25
        throttle.yield_to_requests()
        has_requests = True
        clock.now += 0.125
        throttle.yield_to_requests()
    assert clock.slept == [0.125]  # work done without requests is not paused for later


def test_only_the_throttled_thread_pauses(clock: Clock) -> None:
    with throttle.throttled(lambda: True):
        clock.now += 1
        lane = threading.Thread(target=throttle.yield_to_requests)
        lane.start()
        lane.join()
    throttle.yield_to_requests()
    assert clock.slept == []
