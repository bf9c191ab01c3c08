"""Writes the tables to files, all from one snapshot of the database, while others go on writing."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psycopg
from psycopg import sql
from pydantic import BaseModel

from services.shared.jobs.db.lifecycle_store import REMOVAL_LOCK
from services.shared.jobs.db.snapshot.connection import (
    TableShape,
    connect,
    schema_revision,
    table_shapes,
)

_COMPRESSION = 1  # of gzip: the rows are mostly JSON


class DumpedTable(BaseModel):
    """A table in a backup."""

    name: str
    columns: list[str]
    rows: int
    sha256: str  # of the rows, before compression


@dataclass(frozen=True)
class Dump:
    """What was written, and the state that it holds."""

    revision: str
    taken_at: datetime
    tables: list[DumpedTable]


def table_file(directory: Path, table: str) -> Path:
    """Return the file of a table: COPY's text format, compressed, in order of the primary key."""
    return directory / f"{table}.copy.gz"


def dump_tables(database_url: str, directory: Path) -> Dump:
    """Write every table below a directory, in bounded memory. Raises Unavailable, OSError."""
    directory.mkdir(parents=True)
    with connect(database_url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        row = connection.execute("SELECT now()").fetchone()
        assert row is not None
        tables = [_dump(connection, shape, directory) for shape in table_shapes(connection)]
        return Dump(schema_revision(connection), row[0], tables)


@contextmanager
def removals_stopped(database_url: str) -> Iterator[None]:
    """Let no process remove files until the block ends; wait for one that does. Raises Unavailable."""
    with connect(database_url) as connection:
        connection.autocommit = True
        connection.execute("SELECT pg_advisory_lock_shared(%s)", [REMOVAL_LOCK])
        yield  # the lock ends with the connection


def _dump(connection: psycopg.Connection, shape: TableShape, directory: Path) -> DumpedTable:
    columns = sql.SQL(", ").join(map(sql.Identifier, shape.columns))
    # By bytes, whatever the database's collation: the files of a backup are listed in this order.
    in_bytes = sql.SQL('{}::text COLLATE "C"')
    order = sql.SQL(", ").join(in_bytes.format(sql.Identifier(column)) for column in shape.key)
    query = sql.SQL("COPY (SELECT {} FROM {} ORDER BY {}) TO STDOUT").format(
        columns, sql.Identifier(shape.name), order
    )
    digest, rows = hashlib.sha256(), 0
    with (
        gzip.open(table_file(directory, shape.name), "wb", compresslevel=_COMPRESSION) as file,
        connection.cursor() as cursor,
        cursor.copy(query) as copy,
    ):
        for block in copy:
            data = bytes(block)
            digest.update(data)
            rows += data.count(b"\n")  # COPY escapes those of values
            file.write(data)
    return DumpedTable(
        name=shape.name, columns=list(shape.columns), rows=rows, sha256=digest.hexdigest()
    )
