"""`stillhouse backup` and `stillhouse restore`: database and files of a platform, running or lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.client import AsJson, print_json
from services.cli.embedded.maintenance import (
    DEFAULT_DATA_DIR,
    DataDir,
    failures_of,
    platform_environment,
    run_maintenance,
)
from services.cli.terminal import Console
from services.shared.memory.sizes import format_size

_MODULE = "services.shared.jobs.backup.main"


def backup(
    directory: Annotated[
        Path, typer.Argument(help="A directory of backups, on another disk than the platform.")
    ],
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Make none; compare the newest one, or the one named, with its hashes."
        ),
    ] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Back up database and files while the platform runs; unchanged files are linked, not copied."""
    with failures_of("backup"):
        if verify:
            found = run_maintenance(_MODULE, "verify", str(directory.resolve()))
        else:
            with platform_environment(data_dir) as env:
                found = run_maintenance(_MODULE, "create", str(directory.resolve()), env=env)
    if as_json:
        print_json(found)
        return
    what = "is intact" if verify else "is complete"
    Console(highlight=False).print(
        f"{found['backup']} {what}: {sum(found['rows'].values()):,} rows and {found['num_files']:,} files "
        f"({format_size(found['num_bytes'])}), of which {found['num_copied_files']:,} "
        f"({format_size(found['num_copied_bytes'])}) were copied; {found['seconds']} s",
        soft_wrap=True,
    )


def restore(
    directory: Annotated[
        Path, typer.Argument(help="A backup, or a directory of backups for the newest one.")
    ],
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Discard the rows of the platform and move its files, if it has any."
        ),
    ] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Restore database and files of a platform that does not run; jobs that ran resume."""
    arguments = ["--replace"] if replace else []
    with failures_of("restore"), platform_environment(data_dir, create=True) as env:
        found = run_maintenance(_MODULE, "restore", str(directory.resolve()), *arguments, env=env)
    if as_json:
        print_json(found)
        return
    console = Console(highlight=False)
    console.print(
        f"Restored {found['backup']}, made at {found['taken_at'][:19].replace('T', ' ')} UTC: "
        f"{sum(found['rows'].values()):,} rows and {found['num_files']:,} files "
        f"({format_size(found['num_bytes'])}); {found['seconds']} s",
        soft_wrap=True,
    )
    if found["requeued_jobs"]:
        console.print(
            f"{len(found['requeued_jobs'])} jobs ran then and are queued again: they resume from their "
            "last checkpoints.",
            soft_wrap=True,
        )
    if found["replaced"]:
        console.print(f"What the data directory held is in {found['replaced']}.", soft_wrap=True)
