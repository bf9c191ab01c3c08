"""The multipart form of an upload, made of command-line options and files."""

from __future__ import annotations

import csv
import io
import json
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypedDict

from services.cli.client import CommandFailed

_HEAD_TYPES = ("single_label", "multi_label")


class HeadOption(TypedDict, total=False):
    """A head as declared on the command line; `name` is always present."""

    name: str
    type: str
    columns: list[str]
    column: str


def parse_head(text: str) -> HeadOption:
    """Parse NAME[:TYPE][=COLUMN[,COLUMN]]; the type may also follow the column."""
    declared, _, column = text.partition("=")
    name, _, kind = declared.partition(":")
    if not kind:
        start, colon, end = column.rpartition(":")
        if colon and end in _HEAD_TYPES:
            column, kind = start, end
    head: HeadOption = {"name": name}
    if kind:
        head["type"] = kind
    if kind == "multi_label" and "," in column:
        head["columns"] = [part.strip() for part in column.split(",") if part.strip()]
    elif column:
        head["column"] = column
    return head


def parse_label_names(options: list[str]) -> dict[str, dict[str, str]]:
    """Parse HEAD=FIRST,SECOND and HEAD=FILE. Raises CommandFailed."""
    names = {}
    for option in options:
        head, separator, value = option.partition("=")
        if not head or not separator or not value:
            raise CommandFailed(f"--label-names {option!r} is not HEAD=FIRST,SECOND or HEAD=FILE")
        path = Path(value)
        names[head] = _read_names(path) if path.is_file() else _numbered(value.split(","))
    return names


def make_form(**options: Any) -> dict[str, str]:
    """Return the form's fields; options that are None, False or empty are left out."""
    form = {}
    for name, value in options.items():
        if name == "heads":
            form[name] = json.dumps(value)
        elif isinstance(value, bool):
            if value or name == "header":
                form[name] = "true" if value else "false"
        elif isinstance(value, list | dict):
            if value:
                form[name] = json.dumps(value)
        elif value is not None:
            form[name] = value
    return form


@contextmanager
def bundle(files: list[Path]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and the content to upload: a file itself, several or a directory as a zip archive.

    Raises CommandFailed where a file cannot be read.
    """
    try:
        if len(files) == 1 and not files[0].is_dir():
            with files[0].open("rb") as content:
                yield files[0].name, content
            return
        with tempfile.TemporaryFile() as archive:
            with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
                for path in files:
                    _add(writer, path)
            archive.seek(0)
            yield f"{files[0].resolve().stem}.zip", archive
    except OSError as error:
        raise CommandFailed(
            f"Cannot read {error.filename or files[0]}: {error.strerror}"
        ) from error


def _add(writer: zipfile.ZipFile, path: Path) -> None:
    if not path.is_dir():
        writer.write(path, path.name)
        return
    for member in sorted(path.rglob("*")):
        if member.is_file():
            writer.write(member, member.relative_to(path).as_posix())


def _numbered(names: list[str]) -> dict[str, str]:
    return {str(number): name.strip() for number, name in enumerate(names)}


def _read_names(path: Path) -> dict[str, str]:
    """Read a JSON object, a JSON list, CSV lines VALUE,NAME, or one name per line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{path} is not UTF-8") from error
    if text.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise CommandFailed(f"{path} is not valid JSON: {error}") from error
        if isinstance(value, list):
            return _numbered([str(item) for item in value])
        return {str(key): str(item) for key, item in value.items()}
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    if all(len(row) == 1 for row in rows):
        return _numbered([row[0] for row in rows])
    if any(len(row) != 2 for row in rows):
        raise CommandFailed(f"{path} is not made of lines VALUE,NAME")
    return {value.strip(): name.strip() for value, name in rows}
