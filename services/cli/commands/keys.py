"""`stillhouse keys`: create, list and revoke the keys in a keys file."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from services.api.auth.keys import ApiKey, KeyName, KeysFile, Scope
from services.cli.client import AsJson, print_json
from services.cli.terminal import Console
from services.shared.jobs.projects import DEFAULT_PROJECT, is_project

app = typer.Typer(no_args_is_help=True, help="Create and revoke API keys; a running API notices.")

File = Annotated[
    Path,
    typer.Option(
        "--file", envvar="STILLHOUSE_API_KEYS_FILE", help="The keys file; created if missing."
    ),
]
Name = Annotated[str, typer.Argument(help="Who uses the key: the name in the audit log.")]


@app.command()
def create(
    name: Name,
    file: File,
    scopes: Annotated[
        list[Scope], typer.Option("--scope", help="What the key permits; repeatable.")
    ],
    project: Annotated[
        str, typer.Option("--project", help="The project that the key belongs to.")
    ] = DEFAULT_PROJECT,
    as_json: AsJson = False,
) -> None:
    """Add a key to the file, and print it: only its hash is stored."""
    entries = _read(file)
    if name in entries:
        _fail(f"{file} has a key {name!r} already; revoke it first, or choose another name.")
    if not is_project(project):
        _fail(
            f"--project {project!r} is no project: a-z, 0-9, _ and -, a letter first, 64 at most."
        )
    try:
        TypeAdapter(KeyName).validate_python(name)
    except ValidationError:
        _fail(f"{name[:80]!r} is no name of a key: 1 to 120 characters, no control characters.")
    key = "sh_" + secrets.token_urlsafe(32)
    entries[name] = ApiKey(
        sha256=hashlib.sha256(key.encode()).hexdigest(), scopes=frozenset(scopes), project=project
    )
    _write(file, entries)
    if as_json:
        shown = sorted(map(str, scopes))
        print_json({"name": name, "project": project, "scopes": shown, "key": key})
        return
    Console(stderr=True).print(
        f"Added {name!r} to {file}. The key is shown once:", markup=False, highlight=False
    )
    typer.echo(key)


@app.command("list")
def list_keys(file: File, as_json: AsJson = False) -> None:
    """List the keys of the file by name, with their projects and scopes."""
    entries = _read(file)
    rows = [
        {"name": name, "project": entry.owner, "scopes": sorted(map(str, entry.scopes))}
        for name, entry in sorted(entries.items())
    ]
    if as_json:
        print_json(rows)
        return
    table = Table("name", "project", "scopes")
    for row in rows:
        table.add_row(str(row["name"]), str(row["project"]), ", ".join(row["scopes"]))
    Console().print(table)


@app.command()
def revoke(name: Name, file: File, as_json: AsJson = False) -> None:
    """Remove a key from the file."""
    entries = _read(file)
    if name not in entries:
        _fail(f"{file} has no key {name!r}; it has {', '.join(sorted(entries)) or 'none'}.")
    del entries[name]
    _write(file, entries)
    if as_json:
        print_json({"revoked": name})
        return
    Console().print(f"Revoked {name!r}.", markup=False, highlight=False)


def _read(file: Path) -> dict[str, ApiKey]:
    try:
        return KeysFile.validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        _fail(f"{file} cannot be read as a keys file: {error}")


def _write(file: Path, entries: dict[str, ApiKey]) -> None:
    """Write the file in place, on disk before the key is shown.

    Not by renaming: a container that mounts this one file would go on seeing the former one. An API that
    reads it half written keeps its former keys, and reads it again.
    """
    text = KeysFile.dump_json(entries, indent=2, exclude_none=True) + b"\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as output:
            output.write(text)
            output.truncate()
            output.flush()
            os.fsync(output.fileno())
    except OSError as error:
        _fail(f"{file} cannot be written: {error.strerror}.")


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)
