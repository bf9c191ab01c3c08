"""`python -m tools.diagnose_batch_score FILE`: score reports collected after the rules were frozen.

A report lists the causes that its thread supports. Each is diagnosed with what a user would state,
and again from the raw log alone.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, TypedDict

from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import Confidence, Diagnosis, Strength


class BatchReport(TypedDict):
    """A public report: its address, what the thread found, and the causes that match it."""

    id: str
    source: str
    finding: str
    causes: list[str]
    case: dict[str, Any]


def read_batch(path: Path) -> list[BatchReport]:
    """Return the reports of a file."""
    reports: list[BatchReport] = json.loads(path.read_text(encoding="utf-8"))
    return reports


def outcome(report: BatchReport, *, raw: bool) -> str:
    """Return "right", "left" for undecided with the truth left, "wrong" or "certain and wrong"."""
    case = {"log": report["case"].get("log", "")} if raw else report["case"]
    found = diagnose(Case.from_dict(case))
    if str(found.cause) in report["causes"]:
        return "right"
    if found.confidence is Confidence.UNDECIDED and _possible(found) & set(report["causes"]):
        return "left"
    return "certain and wrong" if found.confidence is Confidence.CERTAIN else "wrong"


def _possible(found: Diagnosis) -> set[str]:
    return {str(h.cause) for h in found.hypotheses if h.strength is not Strength.EXCLUDED}


def main() -> None:
    """Print the outcomes for the file named, with options and from the raw log."""
    reports = read_batch(Path(sys.argv[1]))
    for name, raw in (("with options", False), ("raw log alone", True)):
        outcomes = {report["id"]: outcome(report, raw=raw) for report in reports}
        sys.stdout.write(f"{name}: {dict(Counter(outcomes.values()))} of {len(reports)}\n")
        for report_id, result in outcomes.items():
            if "wrong" in result:
                sys.stdout.write(f"  {result}: {report_id}\n")


if __name__ == "__main__":
    main()
