"""Two ranks under torchrun, the teacher sharded over them, against one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from services.distiller.distill import distill
from services.shared.jobs.run_directory import (
    ProgressRecord,
    Report,
    RunDirectory,
    read_record,
    read_records,
    write_json,
)
from services.shared.training.process import Position, World

if TYPE_CHECKING:
    from tests.distiller.conftest import MakeTask

REPOSITORY = Path(__file__).parents[2]
CHANGES: dict[str, Any] = {
    # Odd, so that the teacher runs on different numbers of texts per rank in the online epoch.
    "training": {"batch_size": 15},
    "distillation": {
        "teacher_placement": "sharded",
        "signals": "auto",
        "hidden_weight": 0.2,
        "cache_hidden": True,
    },
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, task: MakeTask) -> RunDirectory:
    run = RunDirectory(tmp_path_factory.mktemp("ranks") / "run")
    write_json(run.spec, task(**CHANGES))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "services.distiller.main", str(run.path)]
    ended = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return run


def evaluations(run: RunDirectory) -> list[dict[str, Any]]:
    records = [record for _, record in read_records(run.progress, ProgressRecord)]
    return [r.evaluation for r in records if r.evaluation is not None]


def test_two_ranks_with_a_sharded_teacher_give_the_losses_of_one(
    two_ranks: RunDirectory, task: MakeTask, run: RunDirectory, world: World
) -> None:
    distill(run, task(**CHANGES), world, Position())
    ours, theirs = evaluations(run), evaluations(two_ranks)
    assert len(ours) == 2
    assert [e["loss"] for e in theirs] == pytest.approx([e["loss"] for e in ours], rel=1e-3)


def test_the_report_says_that_the_teacher_was_sharded(two_ranks: RunDirectory) -> None:
    report = read_record(two_ranks.report, Report)
    assert report is not None
    assert report.evaluation["teacher"]["placement"] == "sharded"
    assert report.outcome == "succeeded"
