"""`python -m tools.diagnose_score [FILE]`: score diagnoses against known failures.

A file holds reports: a case, and what is known of its cause. The cause of a `firm` report is
established; any other may be diagnosed `undecided` or `likely`, never `certain`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import Confidence, Diagnosis, Sharded

REPORTS = Path("tests/data/oom_reports.json")

# Values of `sharded` in the reports that a diagnosis does not use.
_SHARDED = {
    "partial": Sharded.PARTLY,
    "na": Sharded.UNKNOWN,
    "not_reached": Sharded.UNKNOWN,
}


class Expectation(TypedDict):
    """What is known of a report's failure; `cause` is None where it was never established."""

    firm: bool
    cause: str | None
    sharded: str


class Report(TypedDict):
    """A published failure: the case as its reporter gave it, and the known answer."""

    id: str
    case: dict[str, Any]
    expect: Expectation


@dataclass(frozen=True)
class Score:
    """One report: the known answer and the diagnosis."""

    name: str
    firm: bool
    known_cause: str | None
    known_sharded: Sharded
    diagnosis: Diagnosis

    @property
    def is_scored(self) -> bool:
        """Whether its cause is established, so that an answer can be right or wrong."""
        return self.firm and self.known_cause is not None

    @property
    def cause_is_correct(self) -> bool:
        """Whether the cause is the known one."""
        return str(self.diagnosis.cause) == self.known_cause

    @property
    def sharding_is_correct(self) -> bool:
        """Whether the answer on sharding is the known one."""
        return self.diagnosis.sharded is self.known_sharded

    @property
    def certain_and_wrong(self) -> bool:
        """Whether it claims certainty where the cause is another, or not established."""
        return self.diagnosis.confidence is Confidence.CERTAIN and not self.cause_is_correct


def score(reports: Sequence[Report]) -> list[Score]:
    """Diagnose the case of every report."""
    return [
        Score(
            name=report["id"],
            firm=report["expect"]["firm"],
            known_cause=report["expect"]["cause"],
            known_sharded=_sharded(report["expect"]["sharded"]),
            diagnosis=diagnose(Case.from_dict(report["case"])),
        )
        for report in reports
    ]


def table(scores: Sequence[Score]) -> str:
    """Return the scores as a Markdown table, and a last line with the sums."""
    lines = [
        "| report | firm | known cause | diagnosis | confidence | sharded: known | diagnosis | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(one) for one in scores]
    counted = [one for one in scores if one.is_scored]
    causes = sum(one.cause_is_correct for one in counted)
    sharded = sum(one.sharding_is_correct for one in counted)
    wrong = sum(one.certain_and_wrong for one in scores)
    lines += [
        "",
        f"{len(counted)} firm reports with a cause: {causes} causes right, {sharded} answers on "
        f"sharding right; of all {len(scores)}, {wrong} certain and wrong.",
    ]
    return "\n".join(lines)


def _row(one: Score) -> str:
    found = one.diagnosis
    mark = ""
    if one.known_cause is not None and not one.cause_is_correct:
        mark = "other cause"
    if one.certain_and_wrong:
        mark = "CERTAIN AND WRONG"
    cells = (
        one.name,
        "yes" if one.firm else "no",
        one.known_cause or "not established",
        found.cause,
        found.confidence,
        one.known_sharded,
        found.sharded,
        mark,
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _sharded(word: str) -> Sharded:
    return _SHARDED.get(word) or Sharded(word)


def main() -> None:
    """Print the table for the file named, or for the reports of the tests."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else REPORTS
    sys.stdout.write(table(score(json.loads(path.read_text(encoding="utf-8")))) + "\n")


if __name__ == "__main__":
    main()
