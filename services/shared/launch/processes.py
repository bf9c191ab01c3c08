"""Child processes that die with their parent, and how to end whole process trees."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

GUARD = Path(__file__).with_name("guard.py")

# Every process of one run has this variable, even when its parents are gone.
RUN_MARK = "STILLHOUSE_RUN_MARK"
# What the guard of a rank reads (see guard.py): NUMA nodes by local rank, '' for none.
NUMA_NODES = "STILLHOUSE_NUMA_NODES"

# This process, or the machine, has no free file descriptor.
NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


def guarded(command: Sequence[str], *, death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the command that runs `command` and gets `death_signal` when its parent dies."""
    options = [] if death_signal == signal.SIGKILL else ["--signal", death_signal.name]
    return [sys.executable, "-I", "-S", str(GUARD), *options, *command]


def start_process(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    user: str | None = None,
    death_signal: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, its output appended to `log`.

    It gets `death_signal` when the calling thread ends, even by SIGKILL. Raises OSError.
    """
    as_user = ["--user", user] if user else []
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            guarded(
                ["--parent", str(os.getpid()), *as_user, *command],
                death_signal=death_signal,
            ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            start_new_session=True,
        )


def process_tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the process and all its descendants that are alive now."""
    try:
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def stop_process(
    process: subprocess.Popen[bytes],
    *,
    stop_signal: signal.Signals = signal.SIGTERM,
    grace_seconds: float,
) -> None:
    """Signal the process, wait, then kill what is left of it and its descendants."""
    members = process_tree(process)
    if process.poll() is None:
        process.send_signal(stop_signal)
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            members = process_tree(process)
    kill_all(members)
    process.wait()


def kill_all(members: Sequence[psutil.Process]) -> None:
    """Kill the processes that are still alive and wait until none of them runs.

    Our own child is left for its Popen to reap, which needs its exit code.
    """
    for member in members:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + 10
    while any(is_alive(member) for member in members) and time.monotonic() < deadline:
        time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; one that only waits to be reaped does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def processes_with_mark(mark: str) -> list[psutil.Process]:
    """Return the living processes that carry this run's mark in their environment.

    Raises OSError where this process or the machine has no free file descriptor: the answer would be
    that there are none.
    """
    needle = f"{RUN_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            if needle in variables:
                found.append(psutil.Process(int(entry.name)))
        except psutil.NoSuchProcess:
            continue
        except OSError as error:  # it has ended, or belongs to another user
            if error.errno in NO_DESCRIPTORS:
                raise
    return found


def wait_until_gone(pid: int, *, seconds: float) -> bool:
    """Return whether the process `pid`, not a child of ours, ends in time."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return True
    deadline = time.monotonic() + seconds
    while is_alive(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
