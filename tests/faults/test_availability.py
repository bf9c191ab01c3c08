"""Which responses of the API an outage explains."""

from __future__ import annotations

import pytest

from tests.faults.availability import MARGIN_SECONDS, AvailabilityMonitor, Response


@pytest.mark.parametrize(
    ("name", "status", "retry_after", "down", "is_expected"),
    [
        ("jobs", 200, False, None, True),
        ("jobs", 503, True, None, False),
        ("jobs", 503, True, "postgres", True),
        ("jobs", 503, False, "postgres", False),
        ("jobs", 500, True, "postgres", False),
        ("jobs", 0, False, "postgres", False),
        ("predict", 503, True, "postgres", False),
        ("predict", 0, False, "api", True),
        ("predict", 503, True, "api", True),
        ("predict", 500, True, "api", False),
    ],
)
def test_an_error_is_checked_against_the_components_that_were_down(
    name: str, status: int, retry_after: bool, down: str | None, is_expected: bool
) -> None:
    monitor = AvailabilityMonitor("http://nowhere")
    if down is not None:
        outage = monitor.begin_outage(down)
        outage.start, outage.end = 10.0, 20.0
    monitor.record(Response(name, 15.0, 15.1, status, retry_after))
    assert (monitor.violations() == []) is is_expected
    assert monitor.counts()[name] == {str(status): 1}


def test_an_outage_explains_no_error_before_or_after_it() -> None:
    monitor = AvailabilityMonitor("http://nowhere")
    outage = monitor.begin_outage("api")
    outage.start, outage.end = 10.0, 20.0
    for start in (5.0, 20.1 + MARGIN_SECONDS):
        monitor.record(Response("predict", start, start + 0.1, 0, False))
    assert len(monitor.violations()) == 2
