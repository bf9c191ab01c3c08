"""`stillhouse gc`: removes what retention and deletion name, as the workers do periodically."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Column, Table

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


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")
    ] = False,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="Declare that this database and these files belong together, after one of them was "
            "restored from elsewhere.",
        ),
    ] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Remove what retention names and what was deleted longer ago than the grace period."""
    arguments = [name for name, given in (("--dry-run", dry_run), ("--adopt", adopt)) if given]
    with failures_of("gc"), platform_environment(data_dir) as env:
        found = run_maintenance("services.shared.jobs.lifecycle.main", "gc", *arguments, env=env)
    if as_json:
        print_json(found)
        return
    console = Console(highlight=False)
    verb = "would be removed" if dry_run else "removed"
    if not found["totals"]:
        console.print("Nothing is to be removed.")
        return
    table = Table(verb, Column("number", justify="right"), Column("size", justify="right"))
    for what, total in found["totals"].items():
        table.add_row(
            what.replace("_", " "), f"{total['count']:,}", format_size(total["size_bytes"])
        )
    console.print(table)
