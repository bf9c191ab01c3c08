"""Two ranks under torchrun: stop, resume, fail."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.shared.jobs.run_directory import (
    Failure,
    ProgressRecord,
    Report,
    RunDirectory,
    StopRequest,
    read_record,
    read_records,
    write_json,
)
from services.shared.jobs.state import Reason
from services.shared.training.checkpoint import checkpoint

if TYPE_CHECKING:
    from tests.trainer.conftest import Begin, MakeTask, Torchrun


@pytest.fixture(scope="module")
def uninterrupted(
    torchrun: Torchrun, make_task: MakeTask, tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    run = RunDirectory(tmp_path_factory.mktemp("uninterrupted"))
    task = make_task(training={"checkpoint_every_steps": 5, "keep_checkpoints": 10})
    code, stderr = torchrun(run, task)
    assert code == 0, stderr[-4000:]
    return run


def weights_of(run: RunDirectory) -> dict[str, str]:
    files = json.loads((run.export / "manifest.json").read_text())["files"]
    return {name: digest for name, digest in files.items() if name.endswith(".safetensors")}


def test_both_ranks_record_their_memory(uninterrupted: RunDirectory) -> None:
    assert uninterrupted.ranks() == [0, 1]
    assert all(uninterrupted.memory_file(rank).exists() for rank in (0, 1))


def test_a_stopped_run_saves_and_resumes_to_the_same_bits(
    torchrun: Torchrun, make_task: MakeTask, uninterrupted: RunDirectory, tmp_path: Path
) -> None:
    task = make_task(training={"checkpoint_every_steps": 5, "keep_checkpoints": 10})
    run = RunDirectory(tmp_path)
    write_json(run.stop, StopRequest(reason="cancelled"))
    assert torchrun(run, task)[0] == 0
    report = read_record(run.report, Report)
    assert report is not None
    assert (report.outcome, report.stop_reason, report.steps) == ("stopped", "cancelled", 1)
    run.stop.unlink()
    run.report.unlink()
    assert torchrun(run, task)[0] == 0
    assert weights_of(run) == weights_of(uninterrupted)


def test_one_rank_resumes_the_checkpoint_of_two(
    torchrun: Torchrun, make_task: MakeTask, uninterrupted: RunDirectory, tmp_path: Path
) -> None:
    earlier = tmp_path / "earlier"
    shutil.copytree(uninterrupted.checkpoints / "step-00000005", earlier / "step-00000005")
    run = RunDirectory(tmp_path / "run")
    task = make_task(training={"checkpoint_every_steps": 5}, resume_dir=earlier)
    assert torchrun(run, task, ranks=1)[0] == 0
    ours, theirs = (read_record(r.report, Report) for r in (run, uninterrupted))
    assert ours is not None
    assert theirs is not None
    assert ours.steps == theirs.steps
    assert ours.evaluation["loss"] == pytest.approx(theirs.evaluation["loss"], rel=1e-3)


def test_a_failing_rank_records_its_reason(
    torchrun: Torchrun, make_task: MakeTask, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"never read")
    task = make_task(model_dir=tmp_path / "pickled", spec={"model": {"path": "pickled"}})
    code, _ = torchrun(run, task)
    assert code != 0
    failure = read_record(run.failure_file(0), Failure)
    assert failure is not None
    assert failure.reason is Reason.BAD_MODEL
    assert failure.phase == "load"
    assert not run.report.exists()


def test_sigterm_is_answered_with_a_checkpoint(
    begin: Begin, make_task: MakeTask, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    process = begin(run, make_task(training={"epochs": 1000}))
    while not any(record.step for _, record in read_records(run.progress, ProgressRecord)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
        assert process.stderr is not None
        assert process.returncode is None, process.stderr.read()[-4000:]
    process.terminate()
    process.communicate(timeout=120)
    report = read_record(run.report, Report)
    assert report is not None
    assert (report.outcome, report.stop_reason) == ("stopped", "handed_back")
    (saved,) = checkpoint.complete_checkpoints(run.checkpoints)
    assert saved.name == f"step-{report.steps:08d}"
    assert run.failures() == []
