"""Latency with ten thousand queued jobs: `make bench-queue`.

    python -m tests.bench.job_queue [--jobs N] [--rounds N] [--write FILE]

Two identical platforms run, one with the jobs and one with an empty table; every query goes to both, in
random order. Queries that need a job (show, claim, finish) get a single one in the empty table, which is
deleted afterwards. Listing and showing go over HTTP, claiming and finishing through the store, as workers
do. Exits with 1 if a p95 is more than twice that of the empty table.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from sqlalchemy import text

from services.shared.datasets.card import DatasetCard, Head, Split
from services.shared.jobs.db.store import Store, open_store
from services.shared.jobs.ids import new_id
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.run_directory import Report
from services.shared.jobs.spec import TeacherSpec
from services.shared.jobs.views import Claim
from tests.factories import create_job
from tests.fuzz.api_alone import ApiAlone, api_alone

MOST_RATIO = 2.0
WARM_UP = 20  # rounds that are not counted
SETTINGS = {"requests_per_second": "0"}
HEAD = Head(name="mood", labels=["bad", "good"])
REPORT = Report(
    outcome="succeeded",
    heads=[HEAD.model_dump(mode="json")],
    parameters=1000,
    size_bytes=4000,
    evaluation={"heads": {"mood": {"macro_f1": 0.9}}},
)
_MODEL = {"config": {"model_type": "qwen3", "hidden_size": 64}, "tokenizer": {"train": True}}


def main() -> None:
    """Fill one platform, query both, print the table, and write it if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--write", type=Path, help="A Markdown file for the table.")
    parser.add_argument("--directory", type=Path, default=Path(".stillhouse/bench/queue"))
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    with ExitStack() as stack:
        full, empty = (
            Platform(stack.enter_context(api_alone(options.directory / name, **SETTINGS)))
            for name in ("full", "empty")
        )
        seconds = full.fill(options.jobs)
        print(f"{options.jobs} jobs stored in {seconds:.0f} s", flush=True)
        measure_lists(full, empty, rounds=options.rounds)
        measure_jobs(full, empty, rounds=options.rounds)
        left = full.count_queued()
        rows = [Row.of(name, full.seconds[name], empty.seconds[name]) for name in full.seconds]
    assert left >= options.jobs - options.rounds - WARM_UP, left
    page = render(rows, jobs=options.jobs, rounds=options.rounds)
    print(page)
    if options.write:
        options.write.write_text(page, encoding="utf-8")
    slow = [row.name for row in rows if row.ratio > MOST_RATIO]
    if slow:
        sys.exit(f"bench-queue: more than {MOST_RATIO:g} times an empty table: {', '.join(slow)}")


@dataclass
class Platform:
    """One platform, and the latencies of its answers."""

    api: ApiAlone
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store: Store = open_store(self.api.settings)
        self.client: httpx.Client = self.api.client()
        card = DatasetCard(
            id=new_id("ds"),
            name="moods",
            heads=[HEAD],
            rows={Split.TRAIN: 8, Split.VALIDATION: 1, Split.TEST: 1},
            label_counts={HEAD.name: dict.fromkeys(HEAD.labels, 5)},
            missing_labels={HEAD.name: 0},
            sha256="0" * 64,
        )
        self.api.settings.dataset_dir(card.id).mkdir(parents=True)
        spec = {"kind": "teacher", "dataset_id": self.store.add_dataset(card).id, "model": _MODEL}
        self.spec = TeacherSpec.model_validate(spec)

    def fill(self, jobs: int) -> float:
        """Store queued jobs as POST /jobs does; return the seconds it took."""
        started = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            self.job_ids = list(pool.map(lambda _: self.new_job(), range(jobs)))
        random.shuffle(self.job_ids)
        return time.perf_counter() - started

    def new_job(self) -> str:
        return create_job(self.store, self.spec)[0].id

    def timed(self, name: str, query: Callable[[], object], *, counts: bool) -> object:
        """Run a query, and record its latency under `name` if it counts."""
        started = time.perf_counter()
        answer = query()
        if counts:
            self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        return answer

    def get(self, path: str) -> httpx.Response:
        response = self.client.get(path)
        assert response.status_code == 200, response.text
        return response

    def claim_and_finish(self, job_id: str, *, counts: bool) -> None:
        claim = self.timed("claim", lambda: self._claim(job_id), counts=counts)
        assert isinstance(claim, Claim)
        outcome = Outcome(end=End.SUCCEEDED, report=REPORT)
        self.timed("finish", lambda: self.store.finish(claim, outcome), counts=counts)

    def _claim(self, job_id: str) -> Claim | None:
        return self.store.claim(job_id, worker="bench", lease_seconds=60)

    def delete(self, job_id: str) -> None:
        """Delete a job and its dependent rows."""
        with self.store.engine.begin() as connection:
            for table, column in (
                ("models", "job_id"),
                ("attempts", "job_id"),
                ("events", "job_id"),
                ("jobs", "id"),
            ):
                connection.execute(
                    text(f"DELETE FROM {table} WHERE {column} = :id"), {"id": job_id}
                )

    def count_queued(self) -> int:
        with self.store.engine.connect() as connection:
            found = connection.execute(text("SELECT count(*) FROM jobs WHERE state = 'queued'"))
            return int(found.scalar_one())


def measure_lists(full: Platform, empty: Platform, *, rounds: int) -> None:
    """List the newest jobs, those of a state and kind, and a page from the middle."""
    middle = sorted(full.job_ids)[len(full.job_ids) // 2]
    queries = {
        "GET /jobs": "/jobs",
        "GET /jobs?state=queued&kind=teacher": "/jobs?state=queued&kind=teacher",
        "GET /jobs?cursor= (a page in the middle)": f"/jobs?cursor={middle}",
    }
    for number in range(-WARM_UP, rounds):
        for name, path in queries.items():
            for side in random.sample((full, empty), 2):
                found = side.timed(name, lambda: side.get(path), counts=number >= 0)  # noqa: B023
                assert isinstance(found, httpx.Response)
                assert len(found.json()["items"]) == (50 if side is full else 0)


def measure_jobs(full: Platform, empty: Platform, *, rounds: int) -> None:
    """Show a job, claim it and finish it: one of many, and a single one."""
    for number in range(-WARM_UP, rounds):
        for side in random.sample((full, empty), 2):
            job_id = full.job_ids.pop() if side is full else empty.new_job()
            path = f"/jobs/{job_id}"
            side.timed("GET /jobs/{job_id}", lambda: side.get(path), counts=number >= 0)  # noqa: B023
            side.claim_and_finish(job_id, counts=number >= 0)
            if side is empty:
                empty.delete(job_id)


@dataclass(frozen=True)
class Row:
    """One line of the table, in milliseconds."""

    name: str
    full_p50: float
    full_p95: float
    empty_p50: float
    empty_p95: float

    @property
    def ratio(self) -> float:
        return self.full_p95 / self.empty_p95

    @classmethod
    def of(cls, name: str, full: list[float], empty: list[float]) -> Row:
        assert len(full) == len(empty)
        quantiles = [statistics.quantiles(side, n=20) for side in (full, empty)]
        return cls(name, *(1000 * q for side in quantiles for q in (side[9], side[18])))


def render(rows: list[Row], *, jobs: int, rounds: int) -> str:
    """Return the page with the table."""
    where = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    lines = [
        "# Ten thousand queued jobs",
        "",
        f"Written by `make bench-queue`. One platform holds {jobs:,} queued jobs, an identical one an empty table;",
        f"both are queried in turn, {rounds} times each: over HTTP, except that claiming and finishing use the",
        "store, as workers do. Queries that need a job find a single one in the empty table. A list of it has no",
        "rows and one of the full table 50, whose cost is part of the ratio. Postgres 18 without fsync, so that disk",
        "writes do not hide the difference.",
        f"{where}, {time.strftime('%Y-%m-%d', time.gmtime())}.",
        "",
        "| milliseconds | p50, full | p95, full | p50, empty | p95, empty | p95, full / empty |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = (row.full_p50, row.full_p95, row.empty_p50, row.empty_p95)
        cells = " | ".join(f"{number:.1f}" for number in numbers)
        lines.append(f"| `{row.name}` | {cells} | {row.ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
