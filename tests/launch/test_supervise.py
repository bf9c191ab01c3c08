import errno
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.views import HeartbeatReply
from services.shared.launch.processes import RUN_MARK, is_alive, wait_until_gone
from services.shared.launch.supervise import Force, RunExit, link_best_weights, supervise
from services.shared.launch.torchrun import Launch

FAKE = Path(__file__).with_name("fake_ranks.py")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    return directory


def _settings(tmp_path: Path, **changes: object) -> JobSettings:
    values: dict[str, Any] = {
        "database_url": "postgresql://nowhere/none",
        "broker_url": "redis://nowhere",
        "data_dir": tmp_path,
        "heartbeat_seconds": 0.05,
        "stop_grace_seconds": 30.0,
    }
    return JobSettings(**(values | changes))


def _supervise(
    run: RunDirectory,
    behaviour: str,
    *,
    beat: Callable[[], HeartbeatReply] = lambda: HeartbeatReply.CONTINUE,
    stopping: Callable[[], bool] = lambda: False,
    timeout_seconds: float = 60,
    env: dict[str, str] | None = None,
    **settings: object,
) -> RunExit | None:
    launch = Launch(
        command=[sys.executable, str(FAKE), str(run.path), behaviour],
        env=dict(os.environ) | {RUN_MARK: str(run.path)} | (env or {}),
        warnings=[],
    )
    return supervise(
        launch,
        run=run,
        beat=beat,
        stopping=stopping,
        settings=_settings(run.path, **settings),
        timeout_seconds=timeout_seconds,
    )


def _living(run: RunDirectory) -> list[int]:
    pids = json.loads((run.path / "pids").read_text())
    return [pid for pid in pids if psutil.pid_exists(pid) and is_alive(psutil.Process(pid))]


def _beat_once(run: RunDirectory, answer: HeartbeatReply) -> Callable[[], HeartbeatReply]:
    """Answer CONTINUE until the ranks have written their pids."""
    return lambda: answer if (run.path / "pids").exists() else HeartbeatReply.CONTINUE


def test_ranks_that_end_by_themselves_are_left_alone(run: RunDirectory) -> None:
    ending = _supervise(run, "succeed")
    assert ending is not None
    assert (ending.exit_code, ending.stop, ending.force) == (0, None, Force.NONE)


def test_a_cancellation_lets_the_ranks_save_and_leave(run: RunDirectory) -> None:
    ending = _supervise(run, "save_when_asked", beat=lambda: HeartbeatReply.CANCEL)
    assert ending is not None
    assert (ending.exit_code, ending.stop, ending.force) == (0, "cancelled", Force.NONE)
    assert json.loads(run.report.read_text())["stop_reason"] == "cancelled"


def test_a_worker_that_shuts_down_hands_the_job_back(run: RunDirectory) -> None:
    ending = _supervise(run, "save_when_asked", stopping=lambda: True)
    assert ending is not None
    assert (ending.exit_code, ending.stop) == (0, "handed_back")


def test_a_cancellation_during_a_shutdown_stays_a_cancellation(run: RunDirectory) -> None:
    ending = _supervise(
        run, "save_when_asked", stopping=lambda: True, beat=lambda: HeartbeatReply.CANCEL
    )
    assert ending is not None
    assert ending.stop == "cancelled"


def test_a_job_past_its_time_limit_is_requested_to_stop(run: RunDirectory) -> None:
    ending = _supervise(run, "save_when_asked", timeout_seconds=0.1)
    assert ending is not None
    assert ending.stop == "timed_out"


def test_ranks_that_ignore_every_request_are_killed_with_their_children(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.shared.launch.supervise._TERMINATE_SECONDS", 0.2)
    ending = _supervise(
        run,
        "ignore_everything",
        beat=_beat_once(run, HeartbeatReply.CANCEL),
        stop_grace_seconds=0.2,
    )
    assert ending is not None
    assert (ending.exit_code, ending.force) == (-9, Force.KILLED)
    assert _living(run) == []


def test_a_lost_lease_kills_the_ranks_at_once_and_has_no_result(run: RunDirectory) -> None:
    assert _supervise(run, "ignore_everything", beat=_beat_once(run, HeartbeatReply.LOST)) is None
    assert _living(run) == []


def test_an_exception_while_supervising_leaves_no_rank(run: RunDirectory) -> None:
    def beat() -> HeartbeatReply:
        if (run.path / "pids").exists():
            raise RuntimeError("the worker itself fails")
        return HeartbeatReply.CONTINUE

    with pytest.raises(RuntimeError, match="the worker itself"):
        _supervise(run, "ignore_everything", beat=beat)
    assert _living(run) == []


@contextmanager
def no_free_descriptors() -> Iterator[Callable[[], None]]:
    """Yield a function that takes every free descriptor from this process for half a second."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    timers: list[threading.Timer] = []

    def restore() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def exhaust() -> None:
        timers.append(threading.Timer(0.5, restore))
        timers[-1].start()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))

    yield exhaust
    for timer in timers:
        timer.join()
    restore()


def test_no_rank_survives_a_worker_without_descriptors(run: RunDirectory) -> None:
    with no_free_descriptors() as exhaust:

        def beat() -> HeartbeatReply:
            if not (run.path / "pids").exists():
                return HeartbeatReply.CONTINUE
            exhaust()
            return HeartbeatReply.LOST

        assert _supervise(run, "ignore_everything", beat=beat) is None
    assert _living(run) == []


def test_ranks_go_on_while_their_worker_has_no_descriptors(run: RunDirectory) -> None:
    beats: list[str] = []
    with no_free_descriptors() as exhaust:

        def beat() -> HeartbeatReply:
            if not beats:
                exhaust()
            try:
                (run.path / "progress.jsonl").touch()
            except OSError as error:
                beats.append("failed" if error.errno == errno.EMFILE else str(error))
                raise
            beats.append("sent")
            return HeartbeatReply.CANCEL

        ending = _supervise(run, "save_when_asked", beat=beat)
    assert ending is not None
    assert (ending.exit_code, ending.stop, ending.force) == (0, "cancelled", Force.NONE)
    assert (beats[0], beats[-1]) == ("failed", "sent")


def test_a_child_that_outlives_its_rank_is_found_by_its_mark(run: RunDirectory) -> None:
    ending = _supervise(run, "leave_an_orphan")
    assert ending is not None
    assert ending.exit_code == 1
    assert _living(run) == []


def test_ranks_die_with_a_supervisor_that_is_killed(run: RunDirectory) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from services.shared.launch.processes import start_process\n"
        "run = Path(sys.argv[2])\n"
        "start_process([sys.executable, sys.argv[1], str(run), 'save_when_asked'],"
        " log=run / 'log')\n"
        "print('started', flush=True); sys.stdin.read()\n"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", script, str(FAKE), str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert supervisor.stdout is not None
    assert supervisor.stdin is not None
    assert supervisor.stdout.readline() == b"started\n"
    (rank,) = psutil.Process(supervisor.pid).children()
    supervisor.kill()
    supervisor.wait()
    gone = wait_until_gone(rank.pid, seconds=20)
    supervisor.stdin.close()
    supervisor.stdout.close()
    assert gone


def test_the_kernels_kill_in_a_memory_cgroup_is_counted(
    run: RunDirectory, small_cgroup: Path
) -> None:
    beats: list[int] = []

    def beat() -> HeartbeatReply:
        if (run.path / "in_cgroup").exists():
            beats.append(1)
        # Each beat comes after a look at the ranks' cgroups; the first may have looked too early.
        if len(beats) == 2:
            (run.path / "go").touch()
        return HeartbeatReply.CONTINUE

    ending = _supervise(run, "exhaust_memory", beat=beat, env={"FAKE_CGROUP": str(small_cgroup)})
    assert ending is not None
    assert ending.exit_code == -9
    assert ending.oom_killed is True


def test_a_kill_that_the_kernel_did_not_do_is_not_counted(run: RunDirectory) -> None:
    def beat() -> HeartbeatReply:
        for member in psutil.Process().children(recursive=True):
            if str(run.path) in member.cmdline() and "fake_ranks.py" in str(member.cmdline()):
                member.kill()
        return HeartbeatReply.CONTINUE

    ending = _supervise(run, "save_when_asked", beat=beat)
    assert ending is not None
    assert ending.exit_code == -9
    assert ending.oom_killed is not True


def test_best_weights_of_the_attempt_resumed_from_are_carried_along_without_a_copy(
    tmp_path: Path,
) -> None:
    earlier, own = tmp_path / "1/checkpoints", tmp_path / "2/checkpoints"
    for name in ("best-00000003", "step-00000005"):
        (earlier / name).mkdir(parents=True)
        (earlier / name / "COMPLETE").write_text("{}")
    (earlier / "best-00000004").mkdir()  # half written: not complete
    for _ in range(2):
        link_best_weights(earlier, own)
    assert [path.name for path in own.iterdir()] == ["best-00000003"]
    files = [place / "best-00000003/COMPLETE" for place in (earlier, own)]
    assert files[0].samefile(files[1])
