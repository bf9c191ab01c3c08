"""A workload of small jobs of each kind, and the current phase of each."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.shared.jobs.run_directory import RunDirectory
from tests.faults.harness import PlatformHarness, RankProcess

TEACHER = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
STUDENT = {**TEACHER, "hidden_size": 8, "intermediate_size": 16}
# Steps take milliseconds and checkpoints tens of them: many of both, so that faults can hit either.
TRAINING = {
    "max_steps": 60,
    "epochs": 100,
    "eval_every_epochs": 2,
    "batch_size": 8,
    "max_length": 16,
    "learning_rate": 0.01,
    "checkpoint_every_steps": 4,
}
RECIPE = {"compute": "float32", "reduce": "float32", "activation_checkpointing": False}
MAX_ATTEMPTS = 10
# The phases that ranks report, mapped to the phases of the fault catalogue.
PHASES = {
    "launching": "claimed",
    "loading": "loading",
    "wrapping": "loading",
    "training": "training",
    "evaluating": "training",
    "saving": "saving",
    "exporting": "exporting",
    "finishing": "finishing",
}


@dataclass
class TrackedJob:
    """A submitted job, and the faults injected while it was in flight."""

    id: str
    kind: str
    since: float
    draws: list[int] = field(default_factory=list)


@dataclass
class JobSnapshot:
    """The attempt and phase of a job, by its row and the files of its ranks."""

    job_id: str
    kind: str
    attempt: int
    phase: str


class Workload:
    """Submits jobs as others end, and tracks those in flight."""

    def __init__(self, harness: PlatformHarness, rng: random.Random) -> None:
        self._harness = harness
        self._rng = rng
        self._client = httpx.Client(base_url=harness.url, timeout=30)
        self._pending: tuple[str, dict[str, Any]] | None = None  # a request not answered yet
        self._count = 0
        self._polled_at = 0.0
        self._rows: list[tuple[str, str, str, int]] = []
        self.in_flight: dict[str, TrackedJob] = {}
        self.ended: list[TrackedJob] = []
        self.dataset_id = self._upload()
        self.teacher_model_id: str | None = None

    def spec(self, kind: str, *, ranks: int = 1, **training: Any) -> dict[str, Any]:
        """Return a small job of a kind: teacher, distill (needs a teacher) or chain."""
        common = {
            "training": TRAINING | training,
            "recipe": RECIPE,
            "resources": {"ranks": ranks, "device": "cpu"},
            "max_attempts": MAX_ATTEMPTS,
        }
        own = {"config": TEACHER, "tokenizer": {"train": True, "vocab_size": 300}}
        teacher = {"dataset_id": self.dataset_id, "model": own, **common}
        distill = {"student": {"config": STUDENT, "tokenizer": "teacher"}, **common}
        if kind == "teacher":
            return {"kind": kind, **teacher}
        if kind == "chain":
            return {
                "kind": kind,
                "teacher": teacher,
                "distill": distill | {"promote": "when_passed"},
            }
        return {
            "kind": kind,
            "dataset_id": self.dataset_id,
            "teacher": {"model_id": self.teacher_model_id},
            **distill,
        }

    def submit_up_to(self, *, most: int) -> None:
        """Submit one job if fewer than `most` are in flight and the API responds."""
        if self._pending is None and len(self.in_flight) < most:
            kinds = ["teacher", "teacher", "distill", "chain"]
            kind = kinds[self._count % 4] if self.teacher_model_id else "teacher"
            self._count += 1
            ranks = 2 if self._rng.random() < 0.15 else 1
            self._pending = (f"faults-{self._count}", self.spec(kind, ranks=ranks))
        if self._pending is not None:
            self.submit(*self._pending)

    def submit(self, key: str, spec: dict[str, Any]) -> str | None:
        """Submit a job with its idempotency key; a repeated request creates no second job."""
        try:
            answer = self._client.post("/jobs", json=spec, headers={"Idempotency-Key": key})
        except httpx.TransportError:
            return None
        if answer.status_code == 503:
            return None
        assert answer.status_code in (200, 202), answer.text
        self._pending = None
        job = answer.json()
        for job_id in (job["id"], *job["child_job_ids"]):
            kind = "teacher" if job_id == job["id"] and spec["kind"] != "distill" else "distill"
            self.in_flight.setdefault(job_id, TrackedJob(job_id, kind, time.monotonic()))
        return str(job["id"])

    def close(self) -> None:
        """Close the connection to the API."""
        self._client.close()

    def poll(self) -> list[TrackedJob]:
        """Read the rows of the jobs in flight; return the jobs that have ended since the last call."""
        rows = self._harness.execute(
            "SELECT id, kind, state, attempt FROM jobs WHERE id = ANY(:ids)",
            ids=list(self.in_flight),
        )
        self._rows = [(str(i), str(k), str(s), int(str(n))) for i, k, s, n in rows]
        self._polled_at = time.monotonic()
        over = [i for i, _, state, _ in self._rows if state in ("succeeded", "failed", "cancelled")]
        ended = [self.in_flight.pop(job_id) for job_id in over]
        self.ended += ended
        return ended

    def snapshots(self) -> list[JobSnapshot]:
        """Return a snapshot of each job in flight; files are read now, rows are those of the last poll."""
        found = []
        for job_id, kind, state, attempt in self._rows:
            if state in ("queued", "waiting"):
                found.append(JobSnapshot(job_id, kind, attempt, state))
            elif state == "running" and job_id in self.in_flight:
                run = RunDirectory(self._harness.settings.run_dir(job_id, attempt))
                found.append(JobSnapshot(job_id, kind, attempt, phase_of(run)))
        return found

    def _upload(self) -> str:
        rows = [
            {"text": f"{n} it was {word}", "mood": label}
            for n in range(40)
            for word, label in (("clean", "good"), ("dirty", "bad"))
        ]
        file = "".join(json.dumps(row) + "\n" for row in rows).encode()
        form = {"name": "moods", "heads": json.dumps([{"name": "mood"}])}
        answer = self._client.post("/datasets", files={"file": ("m.jsonl", file)}, data=form)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


def phase_of(run: RunDirectory) -> str:
    """Return the phase of a running attempt by the last whole line of its ranks' progress."""
    if run.report.exists():
        return "finishing"
    last = _last_line(run.progress)
    return PHASES[json.loads(last)["phase"]] if last else "claimed"


def _last_line(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 4096))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return b""
    return lines[-1] if lines and lines[-1].startswith(b"{") else b""


def processes_of(processes: list[RankProcess], snapshot: JobSnapshot) -> list[RankProcess]:
    """Return the processes of the attempt in a snapshot."""
    return [
        each
        for each in processes
        if (each.job_id, each.attempt) == (snapshot.job_id, snapshot.attempt)
    ]
