"""The environment of commands that maintain a platform: its database and its data directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.embedded.platform import lock_data_dir, migrate
from services.cli.embedded.servers import StartFailed, postgres_url, start_postgres
from services.cli.embedded.supervisor import project_dir
from services.cli.terminal import Console

DataDir = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        envvar="STILLHOUSE_DATA_DIR",
        help="The data directory of the platform, running or not.",
    ),
]
DEFAULT_DATA_DIR = Path(".stillhouse/data")


@contextmanager
def platform_environment(data_dir: Path, *, create: bool = False) -> Iterator[dict[str, str]]:
    """Yield the variables of a platform's processes.

    The database is that of STILLHOUSE_DATABASE_URL, or else the embedded one of the data directory, which is
    started for the block unless the platform runs; `create` makes one and leaves it empty. Raises
    StartFailed.
    """
    env = {"STILLHOUSE_BROKER_URL": "redis://unused", **os.environ}
    env["STILLHOUSE_DATA_DIR"] = str(data_dir.resolve())
    if "STILLHOUSE_DATABASE_URL" in os.environ:
        yield env
        return
    if not create and not (data_dir / "postgres").is_dir():
        raise StartFailed(
            f"There is no platform in {data_dir}: name its directory with --data-dir, or its database with "
            "STILLHOUSE_DATABASE_URL."
        )
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    env["STILLHOUSE_DATABASE_URL"] = postgres_url(data_dir)
    try:
        lock = lock_data_dir(data_dir)
    except StartFailed:  # it runs
        if create:
            raise
        yield env
        return
    with lock:
        (data_dir / "logs").mkdir(exist_ok=True)
        server = start_postgres(data_dir)
        try:
            if not create:
                migrate(env, data_dir / "logs" / "migrations.log")
            yield env
        finally:
            server.stop()


def running_environment(data_dir: Path) -> dict[str, str]:
    """Return the variables of this process, and those of the embedded platform if it runs."""
    env = dict(os.environ)
    if "STILLHOUSE_DATABASE_URL" in env or not (data_dir / "postgres" / "postmaster.pid").exists():
        return env
    return env | {
        "STILLHOUSE_DATABASE_URL": postgres_url(data_dir),
        "STILLHOUSE_DATA_DIR": str(data_dir.resolve()),
    }


def run_maintenance(module: str, *arguments: str, env: dict[str, str] | None = None) -> Any:
    """Run a maintenance module in a process of its own and return the JSON document that it prints.

    Its messages pass to standard error. Raises StartFailed with its last line.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=env,
        cwd=project_dir(),
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise StartFailed((done.stderr.strip().splitlines() or ["it failed without a message"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def failures_of(command: str) -> Iterator[None]:
    """Print a failure as one sentence and end the command with exit code 1."""
    try:
        yield
    except (StartFailed, OSError) as error:
        Console(stderr=True, highlight=False).print(
            f"{command}: {error}", markup=False, soft_wrap=True
        )
        raise typer.Exit(1) from error
