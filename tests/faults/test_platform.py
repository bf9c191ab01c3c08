"""One job survives the death of every component of a platform, one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.state import JobState
from tests.faults.availability import AvailabilityMonitor
from tests.faults.fault_catalogue import (
    FaultContext,
    kill_api,
    kill_postgres,
    kill_valkey,
    kill_worker,
)
from tests.faults.harness import PlatformHarness
from tests.faults.invariants import check_job
from tests.faults.waiting import wait_until
from tests.faults.workload import JobSnapshot, Workload, phase_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[PlatformHarness]:
    found = PlatformHarness(tmp_path / "harness", has_second_trainer=False)
    found.start()
    yield found
    found.stop()
    assert found.rank_processes() == []


def test_a_job_survives_the_death_of_every_component(harness: PlatformHarness) -> None:
    monitor = AvailabilityMonitor(harness.url, requests=("jobs",))
    workload = Workload(harness, random.Random(1))
    context = FaultContext(harness, workload, monitor, random.Random(1), has_student=False)
    job_id = workload.submit("one", workload.spec("teacher", max_steps=400))
    assert job_id is not None
    monitor.start()
    for condition, faults in (
        (is_launched, (kill_valkey, kill_api)),
        (is_loading, (kill_postgres,)),
        (has_saved, (kill_worker,)),
    ):
        context.target = wait_for(harness, job_id, condition)
        for inject in faults:
            assert inject(context) is not None, inject
    assert wait_until(workload.poll, seconds=180, pause=0.2), harness.store.job(job_id).phase
    assert harness.wait_until_up()
    for thread in context.recovery_threads:
        thread.join(120)
    monitor.stop()
    workload.close()

    job, found = harness.store.job(job_id), check_job(harness.store, job_id)
    assert job.state is JobState.SUCCEEDED
    assert found.violations == []
    # The worker's death costs an attempt but no training progress; no other fault costs an attempt.
    assert [attempt.ending for attempt in job.attempts] == ["lost", "succeeded"]
    assert found.resumed == 1
    assert (monitor.violations(), context.violations) == ([], [])
    assert monitor.counts()["jobs"]["200"] > 0
    names = [path.name for path in harness.settings.models_dir.iterdir()]
    assert names == [job.model_id]


def wait_for(
    harness: PlatformHarness, job_id: str, condition: Callable[[RunDirectory], bool]
) -> JobSnapshot:
    """Return a snapshot of the first attempt once its files meet the condition, without the database."""
    run = RunDirectory(harness.settings.run_dir(job_id, 1))
    assert wait_until(lambda: condition(run), seconds=120, pause=0.005), (
        "the attempt does not reach the condition"
    )
    return JobSnapshot(job_id, "teacher", 1, phase_of(run))


def is_launched(run: RunDirectory) -> bool:
    return run.spec.exists()


def is_loading(run: RunDirectory) -> bool:
    return phase_of(run) == "loading"


def has_saved(run: RunDirectory) -> bool:
    return any(run.checkpoints.glob("step-*/COMPLETE"))
