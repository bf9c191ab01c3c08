"""Work aside rests while requests want the processors, and nothing else does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from services.api.serving.engines import throttle


class Clock:
    """A clock that sleeping moves on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(throttle, "time", clock)
    return clock


def test_it_rests_as_long_as_it_worked_but_never_long(clock: Clock) -> None:
    with throttle.throttled(lambda: True):
        clock.now += 0.25
        throttle.yield_to_requests()
        clock.now += 0.125
        throttle.yield_to_requests()
        clock.now += 60
        throttle.yield_to_requests()
    assert clock.slept == [0.25, 0.125, 0.5]


def test_it_goes_on_while_no_request_is_under_way(clock: Clock) -> None:
    wanted = False
    with throttle.throttled(lambda: wanted):
        clock.now += 0.25
        throttle.yield_to_requests()
        wanted = True
        clock.now += 0.125
        throttle.yield_to_requests()
    assert clock.slept == [0.125]  # what nobody waited for is not made up for


def test_only_the_thread_that_works_aside_rests(clock: Clock) -> None:
    with throttle.throttled(lambda: True):
        clock.now += 1
        lane = threading.Thread(target=throttle.yield_to_requests)
        lane.start()
        lane.join()
    throttle.yield_to_requests()
    assert clock.slept == []
