"""Checks of a platform's storage: room on its disk, and whether database and files belong together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.shared.launch.doctor.machine import (
    Finding,
    Machine,
    failed,
    not_applicable,
    ok,
    warning,
)

# A process of its own: it needs a database driver, which the doctor does not load.
_REPORT = (sys.executable, "-m", "services.shared.jobs.lifecycle.main", "report")
_REPORT_SECONDS = 60.0
_GIB = 2**30
_NEARLY_FULL = 0.1  # of the disk, before jobs wait
_SOON_DAYS = 7.0
_REMEDY = (
    "`stillhouse gc --dry-run` shows what retention would remove; delete models, jobs or datasets, "
    "shorten STILLHOUSE_RETENTION, or add space."
)


def check_storage(machine: Machine) -> list[Finding]:
    """Return the findings on the platform that the environment names."""
    names = ("data disk", "epoch")
    if "STILLHOUSE_DATABASE_URL" not in machine.env:
        why = "no platform runs here; name its directory with --data-dir"
        return [not_applicable(name, why) for name in names]
    try:
        done = subprocess.run(
            _REPORT,
            env={"STILLHOUSE_BROKER_URL": "redis://unused", **machine.env},
            cwd=Path(__file__).resolve().parents[4],
            capture_output=True,
            text=True,
            check=False,
            timeout=_REPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [failed("data disk", "the database does not answer", "See the log of Postgres.")]
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [failed("data disk", message, "Check STILLHOUSE_DATABASE_URL and the database.")]
    return list(_findings(json.loads(done.stdout.splitlines()[-1])))


def _findings(report: dict[str, Any]) -> Iterator[Finding]:
    yield _disk(report)
    problem = report["epoch_problem"]
    if problem:
        yield failed("epoch", problem, "Restore both from one backup, or `stillhouse gc --adopt`.")
    else:
        yield ok("epoch", "database and data directory belong together")


def _disk(report: dict[str, Any]) -> Finding:
    share, full_share = report["disk"]["share"], report["full_share"]
    growth = report["forecast"]
    days = growth and growth["days_until_full"]
    detail = f"{share:.0%} full; jobs wait from {full_share:.0%}"
    if growth:
        detail += f"; grows by {growth['bytes_per_day'] / _GIB:+.2f} GiB a day"
    if days is not None:
        detail += f", so that they wait in {days:.1f} days"
    sizes = sorted(report["stored_bytes"].items(), key=lambda item: -item[1])
    detail += "".join(f"; {kind} {size / _GIB:.2f} GiB" for kind, size in sizes if size)
    if share >= full_share:
        return failed("data disk", detail, _REMEDY)
    if share >= full_share - _NEARLY_FULL or (days is not None and days < _SOON_DAYS):
        return warning("data disk", detail, _REMEDY)
    return ok("data disk", detail)
