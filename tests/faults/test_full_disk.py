"""Failures on a real small file system without a free byte."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.shared.jobs.outcome import End
from services.shared.jobs.run_directory import Failure, RunDirectory, read_record
from services.shared.jobs.state import Reason
from services.shared.launch.aftermath.outcome import MemoryFailure, determine_outcome
from services.shared.launch.supervise import RunExit
from services.shared.training.process import Position, report_failures
from tests.faults.fault_catalogue import write_until_full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB in memory."""
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system may be mounted here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(directory: Path) -> None:
    """Fill the file system to the last byte."""
    with (directory / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            write_until_full(file.fileno(), size)


def save_on_a_full_disk(directory: Path) -> None:
    fill(directory)
    (directory / "checkpoint").write_bytes(b"weights")


def test_a_rank_reports_a_full_disk_on_that_disk(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    run = RunDirectory(small_disk)
    run.rank_dir(0).mkdir(parents=True)
    with pytest.raises(OSError, match="No space left"), report_failures(run, Position()):
        save_on_a_full_disk(small_disk)
    failure = read_record(run.failure_file(0), Failure)
    assert failure is not None
    assert failure.reason is Reason.DISK_FULL


def test_ranks_that_exit_without_a_report_on_a_full_disk_are_not_reported_as_crashed(
    small_disk: Path,
) -> None:
    run = RunDirectory(small_disk)
    run.log.touch()
    fill(small_disk)
    with pytest.raises(OSError) as refused:
        run.log.write_bytes(b"Traceback")
    assert refused.value.errno == errno.ENOSPC

    def judge() -> tuple[End, Reason | None]:
        ending = RunExit(exit_code=1)
        outcome = determine_outcome(
            run, ending, examine=lambda _: MemoryFailure(None, {}), may_retry=False
        )
        return outcome.end, outcome.reason

    assert judge() == (End.FAILED, Reason.DISK_FULL)
    (small_disk / "filler").unlink()
    assert judge() == (End.FAILED, Reason.LAUNCH_FAILED)
