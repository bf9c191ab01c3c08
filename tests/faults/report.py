"""The report of a campaign: a JSON document, and a table of faults by phase."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

PHASES = ("queued", "claimed", "loading", "training", "saving", "exporting", "finishing")


@dataclass
class Draw:
    """One fault drawn in the campaign."""

    number: int
    fault: str
    phase: str
    delay: float
    at: float = 0.0  # seconds since the start
    met: str = ""  # the actual phase of the target
    job_id: str = ""
    did: str | None = None  # None: there was no target


def summarise(
    seed: int,
    draws: list[Draw],
    jobs: dict[str, Any],
    answers: dict[str, dict[str, int]],
    violations: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the counts of a campaign; `jobs` and `answers` are included unchanged."""
    hit = [draw for draw in draws if draw.did is not None]
    table: dict[str, Counter[str]] = {}
    for draw in hit:
        table.setdefault(draw.fault, Counter())[draw.met] += 1
    kinds = Counter(violation["kind"] for violation in violations)
    return {
        "seed": seed,
        "draws": len(draws),
        "hits": len(hit),
        "kills": sum(draw.fault.startswith("kill_") for draw in hit),
        "missed": dict(Counter(draw.fault for draw in draws if draw.did is None)),
        "hits_by_fault_and_phase": {name: dict(row) for name, row in sorted(table.items())},
        **jobs,
        "lost_jobs": kinds["lost"],
        "double_or_wrong_results": kinds["job"],
        "orphans": kinds["orphan"],
        "api_answers": answers,
        "violations": violations,
    }


def print_table(report: dict[str, Any]) -> None:
    """Print hits by fault and phase, then the counts."""
    columns = [*PHASES, "promoting", "ended"]
    print(f"{'fault':<16}" + "".join(f"{name:>10}" for name in columns))
    for fault, row in report["hits_by_fault_and_phase"].items():
        print(f"{fault:<16}" + "".join(f"{row.get(name, 0):>10}" for name in columns))
    for name in (
        "hits",
        "kills",
        "missed",
        "jobs",
        "attempts",
        "attempts_resumed_from_a_checkpoint",
    ):
        print(f"{name}: {report[name]}")
    for name in ("lost_jobs", "double_or_wrong_results", "orphans", "api_answers"):
        print(f"{name}: {report[name]}")
    print(f"violations: {len(report['violations'])}")
