"""The engine local, with real processes in place of torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.shared.jobs.run_directory import RunDirectory
from services.shared.launch.engines.local import LocalEngine
from services.shared.launch.engines.port import ABSENT, EngineState, LaunchEngine, Submission
from services.shared.launch.processes import RUN_MARK, is_alive
from services.shared.launch.torchrun import Launch

NAME = "attempt"
# Prints the pid of a child in a session of its own, as ranks are, and waits for it.
_WITH_CHILD = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; "
    "time.sleep(60)'], start_new_session=True); print(child.pid, flush=True); child.wait()"
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine()
    yield engine
    if engine.status([NAME])[NAME] is not ABSENT:
        engine.kill_remains(NAME)


def _submit(engine: LaunchEngine, run: RunDirectory, program: str) -> str:
    env = dict(os.environ) | {RUN_MARK: str(run.path)}
    launch = Launch(command=[sys.executable, "-c", program], env=env, warnings=[])
    return engine.submit(Submission(name=NAME, run=run, launch=launch))


def _child_of(engine: LocalEngine, run: RunDirectory) -> psutil.Process:
    for _ in range(600):
        printed = engine.logs(run, max_bytes=100)
        if printed.endswith("\n"):
            return psutil.Process(int(printed))
        engine.wait(NAME, 0.1)
    raise AssertionError("the process printed nothing")


def test_an_attempt_that_was_never_submitted_is_absent(engine: LocalEngine) -> None:
    assert engine.status([NAME]) == {NAME: ABSENT}


def test_the_exit_code_and_the_output_of_an_attempt_can_be_read(
    engine: LocalEngine, run: RunDirectory
) -> None:
    pid = _submit(engine, run, "import sys; print('loss 0.5'); sys.exit(3)")
    engine.wait(NAME, 60)
    status = engine.status([NAME])[NAME]
    assert (status.state, status.id, status.exit_code) == (EngineState.ENDED, pid, 3)
    assert engine.logs(run, max_bytes=1000) == "loss 0.5\n"


def test_a_cancelled_attempt_gets_sigterm(engine: LocalEngine, run: RunDirectory) -> None:
    _submit(engine, run, _WITH_CHILD)
    _child_of(engine, run)
    assert engine.status([NAME])[NAME].state is EngineState.RUNNING
    engine.cancel(NAME)
    engine.wait(NAME, 60)
    assert engine.status([NAME])[NAME].exit_code == -15


def test_a_killed_attempt_takes_its_children_along(engine: LocalEngine, run: RunDirectory) -> None:
    _submit(engine, run, _WITH_CHILD)
    child = _child_of(engine, run)
    engine.cancel(NAME, kill=True)
    engine.wait(NAME, 60)
    assert engine.status([NAME])[NAME].exit_code == -9
    assert not is_alive(child)


def test_processes_that_outlive_torchrun_are_found_by_their_mark(
    engine: LocalEngine, run: RunDirectory
) -> None:
    _submit(engine, run, _WITH_CHILD)
    child = _child_of(engine, run)
    engine.cancel(NAME)
    engine.wait(NAME, 60)
    assert is_alive(child)
    engine.kill_remains(NAME)
    assert not is_alive(child)
    assert engine.status([NAME]) == {NAME: ABSENT}
