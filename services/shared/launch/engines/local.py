"""The engine local: torchrun as a child of the worker, which dies with it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from services.shared.files.tail import read_tail
from services.shared.jobs.run_directory import RunDirectory
from services.shared.launch.engines.port import (
    ABSENT,
    EngineState,
    EngineStatus,
    Submission,
)
from services.shared.launch.processes import (
    kill_all,
    process_tree,
    processes_with_mark,
    start_process,
)

log = structlog.get_logger(__name__)

_SEARCH_PAUSE_SECONDS = 0.5  # between searches for ranks while there is no free file descriptor


class LocalEngine:
    """Runs each attempt as a process of this machine; implements `port.LaunchEngine`."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._runs: dict[str, RunDirectory] = {}

    def submit(self, submission: Submission) -> str:
        """Start torchrun; return its pid. Raises OSError."""
        launch, run = submission.launch, submission.run
        process = start_process(launch.command, log=run.log, env=launch.env, cwd=_project_dir())
        self._processes[submission.name], self._runs[submission.name] = process, run
        return str(process.pid)

    def status(self, names: Sequence[str]) -> dict[str, EngineStatus]:
        """Return whether the processes still run; a negative exit code is a signal."""
        return {name: self._status(name) for name in names}

    def cancel(self, name: str, *, kill: bool = False) -> None:
        """Send SIGTERM to torchrun, or kill everything that is below it."""
        process = self._processes[name]
        if kill:
            kill_all(process_tree(process))
        else:
            process.terminate()

    def logs(self, run: RunDirectory, *, max_bytes: int) -> str:
        """Return the end of torchrun's log."""
        return read_tail(run.log, max_bytes=max_bytes)

    def wait(self, name: str, seconds: float) -> None:
        """Return when the attempt has ended, or after some time."""
        try:
            self._processes[name].wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def pids(self, name: str) -> list[int]:
        """Return the processes of an attempt that are alive now."""
        return [member.pid for member in process_tree(self._processes[name])]

    def kill_remains(self, name: str) -> None:
        """Kill torchrun, its ranks and their children, wherever they are in the process tree.

        Ranks run in sessions of their own, so no signal to a process group reaches them, and a rank that
        outlives torchrun is no longer our descendant. The mark in their environment finds them all.

        Finding them takes file descriptors. Where this process has none, torchrun is killed by its pid,
        which takes its ranks with it (see guard.py), and the search is repeated until it succeeds: two
        attempts must never run on one job's checkpoints.
        """
        process, run = self._processes.pop(name), self._runs.pop(name)
        is_reported = False
        while True:
            try:
                kill_all(process_tree(process))
                process.wait()
                left = processes_with_mark(str(run.path))
                if left:
                    pids = [member.pid for member in left]
                    log.warning("ranks_killed", run=str(run.path), pids=pids)
                    kill_all(left)
            except OSError as error:
                if not is_reported:
                    log.warning("search_for_ranks_failed", run=str(run.path), error=str(error))
                is_reported = True
                process.kill()
                time.sleep(_SEARCH_PAUSE_SECONDS)
            else:
                return

    def _status(self, name: str) -> EngineStatus:
        process = self._processes.get(name)
        if process is None:
            return ABSENT
        code = process.poll()
        if code is None:
            return EngineStatus(state=EngineState.RUNNING, id=str(process.pid))
        return EngineStatus(state=EngineState.ENDED, id=str(process.pid), exit_code=code)


def _project_dir() -> Path:
    """Return the directory from which `services` imports, for a checkout that is not installed."""
    return Path(__file__).resolve().parents[4]
