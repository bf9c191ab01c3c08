"""What excuses an answer of the API, and what does not."""

from __future__ import annotations

import pytest

from tests.faults.watch import MARGIN_SECONDS, Watch


@pytest.mark.parametrize(
    ("name", "status", "retry_after", "down", "is_excused"),
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
def test_an_answer_is_held_against_what_was_down(
    name: str, status: int, retry_after: bool, down: str | None, is_excused: bool
) -> None:
    watch = Watch("http://nowhere")
    if down is not None:
        window = watch.begin(down)
        window[:] = [10.0, 20.0]
    watch.note(name, 15.0, 15.1, status=status, retry_after=retry_after)
    assert (watch.violations() == []) is is_excused
    assert watch.counts()[name] == {str(status): 1}


def test_a_window_excuses_nothing_before_and_after_it() -> None:
    watch = Watch("http://nowhere")
    watch.begin("api")[:] = [10.0, 20.0]
    for began in (5.0, 20.1 + MARGIN_SECONDS):
        watch.note("predict", began, began + 0.1, status=0, retry_after=False)
    assert len(watch.violations()) == 2
