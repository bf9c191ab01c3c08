"""Days of a platform at high speed: jobs, promotions, predictions and upkeep, by the clock of its database.

Real: Postgres, the store, the API with its serving, retention and removal. Simulated: time, and what torchrun
does (a run directory with files, then an outcome).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg

from services.shared.datasets.card import Head
from services.shared.jobs.artifact_layout import HEADS_FILE
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.store import Store
from services.shared.jobs.documents import ModelHeadDict
from services.shared.jobs.lifecycle.epoch import tick_epoch
from services.shared.jobs.lifecycle.tidy import tidy
from services.shared.jobs.lifecycle.usage import measure, sample_usage
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.run_directory import COMPLETE, Report, RunDirectory
from services.shared.jobs.spec import DistillSpec, TeacherSpec
from services.shared.jobs.state import Phase, Reason
from services.shared.jobs.views import Claim
from tests.factories import create_job, dataset_card, retry_job
from tests.longevity.clock import DatabaseClock

# Days until something goes are few, so that a steady state is reached within the month.
RETENTION = {
    "checkpoints_days": 1,
    "logs_days": 2,
    "metrics_days": 2,
    "events_days": 2,
    "signals_days": 2,
    "failed_runs_days": 3,
    "finished_runs_days": 3,
    "unpromoted_models_days": 3,
    "superseded_models_days": 3,
}
SETTINGS = {"retention": json.dumps(RETENTION), "delete_grace_days": "1", "usage_seconds": "1"}
_MODEL = {"config": {"model_type": "qwen3"}, "tokenizer": {"train": True, "vocab_size": 300}}
_TICKS = 4  # rounds of upkeep a day
_LOG_BYTES, _CHECKPOINT_BYTES = 20_000, 100_000


@dataclass(frozen=True)
class DayCounts:
    """How much happens in a day."""

    jobs: int
    promotions: int
    predictions: int


@dataclass(frozen=True)
class Measurement:
    """The state of the platform at the end of a day."""

    day: int
    rows: dict[str, int]  # by table
    stored_bytes: dict[str, int]  # by kind of file
    database_bytes: int
    api_bytes: int  # resident memory
    worker_bytes: int


class PlatformDays:
    """A platform that lives through days."""

    def __init__(
        self,
        store: Store,
        *,
        clock: DatabaseClock,
        student: Path,
        counts: DayCounts,
        client: httpx.Client | None = None,
        api_pid: int | None = None,
    ) -> None:
        self.store, self.clock, self.student, self.counts = store, clock, student, counts
        self.client, self.api_pid = client, api_pid
        self.lifecycle = LifecycleStore(store)
        self.rng = random.Random(1)
        self.teachers: list[str] = []
        self.students: list[str] = []
        heads: list[dict[str, Any]] = json.loads((student / HEADS_FILE).read_text())["heads"]
        self.heads = [
            Head.model_validate({k: h[k] for k in ("name", "type", "labels")}) for h in heads
        ]
        self.dataset_id = ""

    def live(self, day: int) -> None:
        """Let a day pass."""
        self._add_dataset(day)
        for tick in range(_TICKS):
            for _ in range(self.counts.jobs // _TICKS):
                self._run_job()
            self._write_signals(f"{day}-{tick}")
            self.clock.advance(timedelta(days=1) / _TICKS)
            self._upkeep()
        for _ in range(self.counts.promotions):
            self._promote()
        self._predict(self.counts.predictions)

    def measure(self, day: int) -> Measurement:
        """Return the rows, bytes and memory now."""
        with psycopg.connect(
            self.store.settings.database_url.replace("+psycopg", "")
        ) as connection:
            tables = connection.execute(
                "SELECT relname FROM pg_stat_user_tables WHERE schemaname = 'public' ORDER BY 1"
            ).fetchall()
            rows = {}
            for (table,) in tables:
                row = connection.execute(f"SELECT count(*) FROM public.{table}").fetchone()
                assert row is not None
                rows[table] = int(row[0])
            size = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        assert size is not None
        api = psutil.Process(self.api_pid).memory_info().rss if self.api_pid else 0
        return Measurement(
            day=day,
            rows=rows,
            stored_bytes=measure(self.store.settings),
            database_bytes=int(size[0]),
            api_bytes=api,
            worker_bytes=psutil.Process().memory_info().rss,
        )

    def _add_dataset(self, day: int) -> None:
        """Upload a dataset every third day, and delete the one before."""
        if day % 3 != 1:
            return
        card = dataset_card(self.heads)
        directory = self.store.settings.dataset_dir(card.id)
        directory.mkdir(parents=True)
        (directory / "train.parquet").write_bytes(os.urandom(50_000))
        former, self.dataset_id = self.dataset_id, self.store.add_dataset(card).id
        if former:
            self.lifecycle.delete("dataset", former, by="ops")

    def _run_job(self) -> None:
        is_distillation = bool(self.teachers) and self.rng.random() < 0.5
        spec: TeacherSpec | DistillSpec
        common = {"dataset_id": self.dataset_id, "name": "longevity"}
        if is_distillation:
            teacher = {"model_id": self.teachers[-1]}
            spec = DistillSpec.model_validate(
                {"kind": "distill", "teacher": teacher, "student": _MODEL, **common}
            )
        else:
            spec = TeacherSpec.model_validate({"kind": "teacher", "model": _MODEL, **common})
        job_id = create_job(self.store, spec)[0].id
        if self.rng.random() < 0.15:
            self._attempt(job_id, self._fail)
            job_id = retry_job(self.store, job_id)[0].id
        model_id = self._attempt(job_id, self._succeed)
        known = self.students if is_distillation else self.teachers
        known.append(model_id)
        del known[:-10]

    def _attempt(self, job_id: str, end: Callable[[Claim, RunDirectory], None]) -> str:
        claim = self.store.claim(job_id, worker="w", lease_seconds=60)
        assert claim is not None
        run = RunDirectory(self.store.settings.run_dir(job_id, claim.attempt))
        for step in range(3):
            evaluation = {"heads": {"h": {"macro_f1": step / 3}}}
            self.store.heartbeat(
                claim,
                phase=(Phase.LOADING, Phase.TRAINING, Phase.EXPORTING)[step],
                progress={"step": step, "evaluation": evaluation},
                lease_seconds=60,
            )
        _write(run.log, _LOG_BYTES)
        _write(run.progress, _LOG_BYTES // 4)
        _write(run.memory_file(0), _LOG_BYTES // 4)
        end(claim, run)
        return claim.model_id

    def _fail(self, claim: Claim, run: RunDirectory) -> None:
        _write(run.checkpoints / "step-1" / "rank-00000.safetensors", _CHECKPOINT_BYTES)
        _write(run.checkpoints / "step-1" / COMPLETE, 2)
        outcome = Outcome(end=End.FAILED, reason=Reason.CRASHED, message="Rank 0 crashed.")
        assert self.store.finish(claim, outcome).applied

    def _succeed(self, claim: Claim, run: RunDirectory) -> None:
        target = self.store.settings.model_dir(claim.model_id)
        if claim.spec.kind == "distill":
            shutil.copytree(self.student, target)
        else:
            _write(target / "manifest.json", 1000)
            _write(target / "model.safetensors", _CHECKPOINT_BYTES)
        heads: list[ModelHeadDict] = [
            {"name": head.name, "type": str(head.type), "labels": head.labels}
            for head in self.heads
        ]
        report = Report(
            outcome="succeeded",
            heads=heads,
            parameters=1000,
            size_bytes=_CHECKPOINT_BYTES,
            evaluation={"heads": {"h": {"macro_f1": 0.9}}},
        )
        assert self.store.finish(claim, Outcome(end=End.SUCCEEDED, report=report)).applied

    def _write_signals(self, name: str) -> None:
        path = self.store.settings.signals_dir / f"{name}.safetensors"
        _write(path, _CHECKPOINT_BYTES)
        now = self.lifecycle.now().timestamp()
        os.utime(path, (now, now))

    def _upkeep(self) -> None:
        self.store.end_lost_attempts()
        tick_epoch(self.lifecycle)
        tidy(self.store)
        sample_usage(self.lifecycle)

    def _promote(self) -> None:
        # With few jobs a day, retention deletes some of the newest five before they are promoted.
        kept = {model.id for model in self.store.list_models(kind="distill", limit=500).items}
        choice = [student for student in self.students[-5:] if student in kept]
        if not choice:
            return
        promotion = self.store.promote(
            self.rng.choice(choice), force=True, reason="a simulated day"
        )
        if self.client is None:
            self.store.report_served(promotion.id, engine="padded")
            return
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.store.promotions(limit=1).items[0].serving is not None:
                return
            time.sleep(0.05)
        raise AssertionError(f"promotion {promotion.id} was neither served nor refused")

    def _predict(self, count: int) -> None:
        for number in range(count if self.client else 0):
            assert self.client is not None
            text = f"the room was clean {number} {self.rng.random()}"
            answer = self.client.post("/predict", json={"inputs": text, "truncate": True})
            assert answer.status_code == 200, answer.text


def _write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
