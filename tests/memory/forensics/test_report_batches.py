"""Public reports that were collected after the rules were frozen."""

from pathlib import Path

import pytest

from tools.diagnose_batch_score import outcome, read_batch

REPORTS = read_batch(Path(__file__).parents[2] / "data" / "oom_reports_a.json")


@pytest.mark.parametrize("raw", [False, True], ids=["with options", "raw log"])
def test_most_reports_are_right_and_none_is_certain_and_wrong(raw: bool) -> None:
    outcomes = [outcome(report, raw=raw) for report in REPORTS]
    assert "certain and wrong" not in outcomes
    assert outcomes.count("right") + outcomes.count("left") >= 0.85 * len(REPORTS)
