"""Public reports that were collected after the rules were frozen."""

from pathlib import Path

import pytest

from tools.diagnose_batch_score import outcome, read_batch

DATA = Path(__file__).parents[2] / "data"
BATCHES = {name: read_batch(DATA / f"oom_reports_{name}.json") for name in "acdef"}


@pytest.mark.parametrize("raw", [False, True], ids=["with options", "raw log"])
@pytest.mark.parametrize("name", BATCHES)
def test_most_reports_are_right_and_none_is_certain_and_wrong(name: str, raw: bool) -> None:
    reports = BATCHES[name]
    outcomes = [outcome(report, raw=raw) for report in reports]
    assert "certain and wrong" not in outcomes
    assert outcomes.count("right") + outcomes.count("left") >= 0.85 * len(reports)


def test_every_report_is_public_and_appears_once() -> None:
    sources = [report["source"] for reports in BATCHES.values() for report in reports]
    assert len(set(sources)) == len(sources)
    assert all(source.startswith("https://github.com/") for source in sources)
    assert all(report["finding"] for reports in BATCHES.values() for report in reports)
