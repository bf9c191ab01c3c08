"""Real torchrun, real ranks: what dies with what, and what torchrun says of it."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import Resources
from services.shared.jobs.views import HeartbeatReply
from services.shared.launch.aftermath.torchelastic_report import read_summary
from services.shared.launch.processes import processes_with_mark, wait_until_gone
from services.shared.launch.supervise import RunExit, supervise
from services.shared.launch.torchrun import Launch, plan_launch


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    return directory


@pytest.fixture
def launch(run: RunDirectory) -> Launch:
    here = str(Path(__file__).parent)
    return plan_launch(
        "fake_rank",
        run.path,
        resources=Resources(ranks=2),
        environment=dict(os.environ) | {"PYTHONPATH": here},
    )


def _pids(run: RunDirectory) -> list[int]:
    """Return the pids of both ranks once both have started."""
    files = [run.rank_dir(rank) / "pid" for rank in (0, 1)]
    texts = [file.read_text() if file.exists() else "" for file in files]
    return [int(text) for text in texts] if all(texts) else []


def _supervise(
    run: RunDirectory, launch: Launch, beat: Callable[[], HeartbeatReply]
) -> RunExit | None:
    settings = JobSettings(
        database_url="postgresql://nowhere/none",
        broker_url="redis://nowhere",
        data_dir=run.path,
        heartbeat_seconds=0.1,
    )
    return supervise(
        launch,
        run=run,
        beat=beat,
        stopping=lambda: False,
        settings=settings,
        timeout_seconds=60,
    )


def test_torchruns_summary_names_the_rank_that_was_killed(
    run: RunDirectory, launch: Launch
) -> None:
    def beat() -> HeartbeatReply:
        if _pids(run):
            (run.path / "die").touch()
        return HeartbeatReply.CONTINUE

    ending = _supervise(run, launch, beat)
    assert ending is not None
    assert ending.exit_code == 1
    first = read_summary(run.log)[0]
    assert (first.rank, first.exit_code, first.is_root_cause) == (1, -9, True)


def test_ranks_die_with_a_torchrun_that_is_killed(run: RunDirectory, launch: Launch) -> None:
    seen: list[int] = []

    def beat() -> HeartbeatReply:
        seen.extend(_pids(run) if not seen else [])
        for member in processes_with_mark(str(run.path)) if seen else []:
            with suppress(psutil.NoSuchProcess):  # it died since it was listed
                if "torch.distributed.run" in member.cmdline():
                    member.kill()
        return HeartbeatReply.CONTINUE

    ending = _supervise(run, launch, beat)
    assert ending is not None
    assert ending.exit_code == -9
    assert len(seen) == 2
    assert all(wait_until_gone(pid, seconds=10) for pid in seen)
    assert "ranks_killed" not in run.log.read_text()
