"""Passing faults of what the platform needs: writes, descriptors, intact files, a worker that is not stopped.

All of them are real: ALTER SYSTEM, RLIMIT_NOFILE, a byte written to a file, SIGSTOP and SIGCONT.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import psycopg

from services.shared.jobs.run_directory import COMPLETE, RunDirectory
from tests.faults.harness import LEASE_SECONDS, WORKERS

if TYPE_CHECKING:
    from tests.faults.fault_catalogue import FaultContext


def read_only_database(context: FaultContext) -> str | None:
    """Let Postgres refuse every write for a few seconds, as a standby or a fenced server does."""
    seconds = context.rng.uniform(0.5, 4)
    url = context.harness.settings.database_url.replace("+psycopg", "")
    try:
        with (
            psycopg.connect(url, autocommit=True) as connection,
            context.monitor.outage("postgres"),
        ):
            connection.execute("SET default_transaction_read_only = off")
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            try:
                connection.execute("SELECT pg_reload_conf()")
                time.sleep(seconds)
            finally:
                connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
                connection.execute("SELECT pg_reload_conf()")
                time.sleep(0.5)  # until every backend has read it
    except psycopg.OperationalError:
        return None
    return f"a read-only database for {seconds:.1f} s"


def exhaust_descriptors(context: FaultContext) -> str | None:
    """Leave the API or a worker without a free file descriptor for a few seconds."""
    name = context.rng.choice(["api", _worker_of_target(context)])
    pid = context.harness.platform.pids.get(name)
    if pid is None:
        return None
    seconds = context.rng.uniform(0.5, 3)
    try:
        with _few_descriptors(psutil.Process(pid)):
            if name == "api":
                with context.monitor.outage("api"), context.monitor.outage("postgres"):
                    time.sleep(seconds)
            else:
                time.sleep(seconds)
    except psutil.NoSuchProcess:
        return None
    return f"no descriptors for {name} ({pid}) for {seconds:.1f} s"


@contextmanager
def _few_descriptors(process: psutil.Process) -> Iterator[None]:
    soft, hard = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds(), hard))
    try:
        yield
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, (soft, hard))


def flip_byte(context: FaultContext) -> str | None:
    """Flip a bit of the target's newest checkpoint and kill its ranks, so that the next attempt reads it."""
    target = context.target
    if target is None:
        return None
    run = RunDirectory(context.harness.settings.run_dir(target.job_id, target.attempt))
    file = _newest_weights(run)
    if file is None:
        return None
    context.flipped.add(target.job_id)
    try:
        with file.open("r+b") as stream:
            position = context.rng.randrange(file.stat().st_size)
            stream.seek(position)
            byte = stream.read(1)[0] ^ (1 << context.rng.randrange(8))
            stream.seek(position)
            stream.write(bytes([byte]))
    except (OSError, IndexError):  # rotated away meanwhile
        return None
    for each in context.harness.rank_processes():
        if (each.job_id, each.attempt) == (target.job_id, target.attempt):
            each.process.kill()
    return f"flipped a bit at {position} of {file.parent.name}/{file.name} of {target.job_id}"


def _newest_weights(run: RunDirectory) -> Path | None:
    complete = sorted(run.checkpoints.glob(f"step-*/{COMPLETE}"))
    files = sorted(complete[-1].parent.glob("*.safetensors")) if complete else []
    return files[0] if files else None


def stop_and_continue_worker(context: FaultContext) -> str | None:
    """Stop a worker for up to twice its lease, then let it go on."""
    name = _worker_of_target(context)
    seconds = context.rng.uniform(0.3, 2 * LEASE_SECONDS)
    pid = context.harness.signal_component(name, signal.SIGSTOP)
    if pid is None:
        return None
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    return f"stopped {name} ({pid}) for {seconds:.1f} s"


def _worker_of_target(context: FaultContext) -> str:
    """Return the component that runs the target, or any worker."""
    if context.target is not None:
        rows = context.harness.execute(
            "SELECT worker FROM jobs WHERE id = :id", id=context.target.job_id
        )
        pid = str(rows[0][0] or "").rpartition(":")[2] if rows else ""
        for name, known in context.harness.platform.pids.items():
            if str(known) == pid:
                return name
    return context.rng.choice(WORKERS)
