"""Simulates a month of a platform and checks that memory, tables and disk stay as they were: `make month`.

python -m tests.longevity.month --days 30 --jobs 80
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from services.shared.jobs.db.store import open_store
from tests.api.serving.artifacts import write_artifact
from tests.fuzz.api_alone import api_alone
from tests.longevity.clock import DatabaseClock
from tests.longevity.growth import faults_of
from tests.longevity.platform_days import SETTINGS, DayCounts, Measurement, PlatformDays

MIB = 2**20


def main() -> None:
    """Simulate the days, print the table, and exit with 1 if something grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=80, help="A day.")
    parser.add_argument("--promotions", type=int, default=4, help="A day.")
    parser.add_argument("--predictions", type=int, default=300, help="A day.")
    parser.add_argument("--directory", type=Path, default=Path(".stillhouse/month"))
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))  # warnings
    shutil.rmtree(options.directory, ignore_errors=True)
    counts = DayCounts(options.jobs, options.promotions, options.predictions)
    measurements = simulate(options.directory.resolve(), days=options.days, counts=counts)
    faults = faults_of(measurements, steady_from=10)
    print("\n".join(faults) or "Nothing grows.")
    sys.exit(bool(faults))


def simulate(directory: Path, *, days: int, counts: DayCounts) -> Sequence[Measurement]:
    """Return the measurements of every day."""
    limits = {"requests_per_second": "0", "predict_per_second": "0"}
    found = []
    started = time.monotonic()
    with api_alone(directory, **SETTINGS, **limits) as api, api.client() as client:
        student = write_artifact(directory / "student", "qwen3")
        clock = DatabaseClock(api.settings.database_url)
        store = open_store(api.settings)
        platform = PlatformDays(
            store, clock=clock, student=student, counts=counts, client=client, api_pid=api.pid
        )
        for day in range(1, days + 1):
            platform.live(day)
            found.append(platform.measure(day))
            if day in (1, 5, 10, 15, 20, 25, days):
                print(_line(found[-1], time.monotonic() - started), flush=True)
        store.engine.dispose()
    return found


def _line(at: Measurement, seconds: float) -> str:
    rows = ", ".join(f"{table} {count}" for table, count in at.rows.items() if count)
    return (
        f"day {at.day} ({seconds:.0f} s): {rows}; "
        f"files {sum(at.stored_bytes.values()) / MIB:.1f} MiB, "
        f"database {at.database_bytes / MIB:.1f} MiB, API {at.api_bytes / MIB:.0f} MiB, "
        f"worker {at.worker_bytes / MIB:.0f} MiB"
    )


if __name__ == "__main__":
    main()
