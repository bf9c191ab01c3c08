"""One job of a whole platform outlives the death of every part of it, one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.state import JobState
from tests.faults.catalogue import (
    Scene,
    kill_api,
    kill_postgres,
    kill_valkey,
    kill_worker,
)
from tests.faults.house import House
from tests.faults.invariants import check_job
from tests.faults.proxy import until
from tests.faults.watch import Watch
from tests.faults.workload import Standing, Workload, phase_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    found = House(tmp_path / "house", is_crowded=False)
    found.start()
    yield found
    found.stop()
    assert found.rank_processes() == []


def test_a_job_outlives_every_part_of_the_platform(house: House) -> None:
    watch = Watch(house.url, asks=("jobs",))
    workload = Workload(house, random.Random(1))
    scene = Scene(house, workload, watch, random.Random(1), has_student=False)
    job_id = workload.submit("one", workload.spec("teacher", max_steps=400))
    assert job_id is not None
    watch.start()
    for condition, strikes in (
        (is_launched, (kill_valkey, kill_api)),
        (is_loading, (kill_postgres,)),
        (has_saved, (kill_worker,)),
    ):
        scene.target = meet(house, job_id, condition)
        for strike in strikes:
            assert strike(scene) is not None, strike
    assert until(workload.look, seconds=180, pause=0.2), house.store.job(job_id).phase
    assert house.wait_until_up()
    for closer in scene.closers:
        closer.join(120)
    watch.stop()
    workload.close()

    job, found = house.store.job(job_id), check_job(house.store, job_id)
    assert job.state is JobState.SUCCEEDED
    assert found.violations == []
    # The worker's death costs an attempt, and nothing that was trained; nothing else costs one.
    assert [attempt.ending for attempt in job.attempts] == ["lost", "succeeded"]
    assert found.resumed == 1
    assert (watch.violations(), scene.violations) == ([], [])
    assert watch.counts()["jobs"]["200"] > 0
    names = [path.name for path in house.settings.models_dir.iterdir()]
    assert names == [job.model_id]


def meet(house: House, job_id: str, condition: Callable[[RunDirectory], bool]) -> Standing:
    """Return the standing of the first attempt when its files show the condition; asks no database."""
    run = RunDirectory(house.settings.run_dir(job_id, 1))
    assert until(lambda: condition(run), seconds=120, pause=0.005), (
        "the attempt does not come there"
    )
    return Standing(job_id, "teacher", 1, phase_of(run))


def is_launched(run: RunDirectory) -> bool:
    return run.spec.exists()


def is_loading(run: RunDirectory) -> bool:
    return phase_of(run) == "loading"


def has_saved(run: RunDirectory) -> bool:
    return any(run.checkpoints.glob("step-*/COMPLETE"))
