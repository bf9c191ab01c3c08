"""The invariants of a job that has ended, whatever faults it met."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path

from services.shared.jobs.db.attempt_queries import LOST, MAX_FREE_LOSSES
from services.shared.jobs.db.store import Store
from services.shared.jobs.ids import model_id_of
from services.shared.jobs.run_directory import ProgressRecord, RunDirectory, read_records
from services.shared.jobs.state import TERMINAL, TRANSITIONS, JobState, Phase, Reason
from services.shared.jobs.views import EventType, EventView, JobView

# Reasons for which a job may fail under external faults: its attempts were used up by kills and lost
# leases, or the job that it waits for failed.
EXPECTED_REASONS = frozenset({Reason.CRASHED, Reason.LOST, Reason.PARENT_FAILED})


@dataclass
class CheckResult:
    """The violations of one job, and how its attempts began."""

    violations: list[str] = field(default_factory=list)
    resumed: int = 0  # attempts that resumed from a checkpoint
    restarted: int = 0  # later attempts that correctly began at step 1

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.violations.append(message)


def check_job(
    store: Store, job_id: str, *, expected: frozenset[Reason] = EXPECTED_REASONS
) -> CheckResult:
    """Check a job that has ended; `expected` are the reasons for which it may have failed."""
    found, job = CheckResult(), store.job(job_id)
    found.require(job.state in TERMINAL, f"it is {job.state}, not ended")
    _check_attempts(found, job, expected)
    _check_result(found, store, job)
    _check_events(found, store, job)
    _check_steps(found, store, job)
    return found


def _check_attempts(found: CheckResult, job: JobView, expected: frozenset[Reason]) -> None:
    numbers = [attempt.number for attempt in job.attempts]
    found.require(numbers == list(range(1, job.attempt + 1)), f"attempts are numbered {numbers}")
    endings = [attempt.ending for attempt in job.attempts]
    found.require(None not in endings, f"an attempt has no end: {endings}")
    free = endings.count("handed_back") + min(endings.count(LOST), MAX_FREE_LOSSES)
    used = len(endings) - free
    found.require(used <= job.max_attempts, f"{used} attempts used of {job.max_attempts}")
    if job.state is JobState.SUCCEEDED:
        found.require(
            endings.count("succeeded") == 1 and endings[-1] == "succeeded",
            f"not exactly the last attempt succeeded: {endings}",
        )
        return
    found.require("succeeded" not in endings, f"{job.state}, yet an attempt succeeded: {endings}")
    found.require(job.reason in expected, f"it failed for {job.reason}: {job.message}")
    if job.attempts:
        found.require(
            job.reason == job.attempts[-1].reason, "job and last attempt give two reasons"
        )
    if job.reason in (Reason.CRASHED, Reason.LOST):
        found.require(
            used >= job.max_attempts or endings.count(LOST) > MAX_FREE_LOSSES,
            f"given up as {job.reason} after {used} of {job.max_attempts} attempts: {job.message}",
        )


def _check_result(found: CheckResult, store: Store, job: JobView) -> None:
    """Compare the artifact with its manifest, and both with the row."""
    if job.state is not JobState.SUCCEEDED:
        found.require(job.model_id is None, "it has not succeeded, yet it has a model")
        return
    found.require(job.model_id == model_id_of(job.id, job.attempt), f"model {job.model_id}")
    model = store.model(job.id)
    manifest = model.path / "manifest.json"
    if not manifest.is_file():
        found.violations.append(f"the artifact {model.path} is not there")
        return
    found.require(
        _sha256(manifest) == model.manifest_sha256, "the manifest is not the one registered"
    )
    for name, expected in json.loads(manifest.read_bytes())["files"].items():
        file = model.path / name
        found.require(
            file.is_file() and _sha256(file) == expected, f"{name} of the artifact is damaged"
        )


def _check_events(found: CheckResult, store: Store, job: JobView) -> None:
    events: list[EventView] = []
    while page := store.events(job.id, after_seq=events[-1].seq if events else 0, limit=500):
        events += page
    states = [JobState(e.data["state"]) for e in events if e.type is EventType.STATE]
    for before, after in pairwise(states):
        found.require(after in TRANSITIONS[before], f"it went from {before} to {after}")
    runs = len({e.attempt for e in events if e.data.get("state") == JobState.RUNNING})
    found.require(
        runs == len(job.attempts), f"{runs} starts in events, {len(job.attempts)} attempts"
    )
    found.require(sum(state in TERMINAL for state in states) == 1, f"ended not once: {states}")


def _check_steps(found: CheckResult, store: Store, job: JobView) -> None:
    """Compare the first step of each attempt with the last checkpoint of earlier attempts."""
    sure = possible = 0  # steps with a checkpoint: certainly, or if the kill came after its rename
    for attempt in job.attempts:
        lines = _progress(store.settings.run_dir(job.id, attempt.number))
        begun = next((s for line in lines if (s := line.step) is not None), None)
        if begun is not None and attempt.number > 1:
            found.require(
                begun in (sure, possible),
                f"attempt {attempt.number} began after step {begun}, with a checkpoint of step {sure}"
                + (f" (or {possible})" if possible != sure else ""),
            )
            found.resumed += begun > 0
            found.restarted += begun == 0
        steps = [line.step for line in lines if line.step is not None]
        found.require(steps == sorted(steps), f"attempt {attempt.number} did the steps {steps}")
        sure, possible = _saved(lines, sure, possible)


def _saved(lines: list[ProgressRecord], sure: int, possible: int) -> tuple[int, int]:
    """Return the last step whose saving had certainly ended, and the last whose saving had begun."""
    for line, after in zip_longest(lines, lines[1:]):
        if line.phase is Phase.SAVING and line.step is not None:
            possible = max(possible, line.step)
            sure = max(sure, line.step) if after is not None else sure
    return sure, max(sure, possible)


def _progress(run_dir: Path) -> list[ProgressRecord]:
    return [record for _, record in read_records(RunDirectory(run_dir).progress, ProgressRecord)]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
