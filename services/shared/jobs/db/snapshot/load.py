"""Reads dumped tables into a database: all of them in one transaction, or none."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path

import psycopg
from psycopg import sql

from services.shared.jobs.db.migrations.upgrade import make_schema, migrate
from services.shared.jobs.db.snapshot.connection import connect, table_shapes
from services.shared.jobs.db.snapshot.dump import DumpedTable, table_file
from services.shared.jobs.db.tables import Table
from services.shared.jobs.errors import Conflict

_READ_BYTES = 1 << 20


def check_target(database_url: str, tables: Sequence[DumpedTable], *, replace: bool) -> None:
    """Raise Conflict where tables cannot be loaded: the database is in use, holds rows, or is too old."""
    _check_known(tables)
    with connect(database_url) as connection:
        _check_replaceable(connection, replace=replace)


def load_tables(
    database_url: str, directory: Path, tables: Sequence[DumpedTable], *, revision: str
) -> None:
    """Make the schema as it was, load the tables, and migrate to the newest version.

    What the database holds is discarded: call `check_target` before. Foreign keys are dropped and made again,
    which checks them: jobs and models refer to each other. Raises Conflict for a damaged file; Unavailable.
    """
    with connect(database_url) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    make_schema(database_url, revision=revision)
    with connect(database_url) as connection:
        constraints = _drop_foreign_keys(connection)
        for table in tables:
            _load(connection, table, directory)
        for table_name, name, definition in constraints:
            connection.execute(
                sql.SQL("ALTER TABLE {} ADD CONSTRAINT {} {}").format(
                    sql.Identifier(table_name), sql.Identifier(name), sql.SQL(definition)
                )
            )
        _advance_identities(connection)
    migrate(database_url)


def _check_replaceable(connection: psycopg.Connection, *, replace: bool) -> None:
    """Raise Conflict for a database that is in use, holds tables of others, or rows to be kept."""
    users = connection.execute(
        """
        SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
        AND backend_type = 'client backend' AND pid <> pg_backend_pid()
        """
    ).fetchone()
    if users is not None and users[0]:
        raise Conflict(
            f"The database is in use by {users[0]} other connections: stop the API and the workers first."
        )
    for shape in table_shapes(connection):
        if shape.name not in Table.metadata.tables:
            raise Conflict(
                f"The database holds a table that is not of Stillhouse: {shape.name}. Give Stillhouse a "
                "database of its own."
            )
        query = sql.SQL("SELECT 1 FROM {} LIMIT 1").format(sql.Identifier(shape.name))
        if not replace and connection.execute(query).fetchone() is not None:
            raise Conflict(
                f"The database is not empty: {shape.name} has rows. --replace discards what it holds."
            )


def _check_known(tables: Sequence[DumpedTable]) -> None:
    """Raise Conflict where this version lacks a table or column of the backup."""
    for table in tables:
        known = Table.metadata.tables.get(table.name)
        columns = set() if known is None else set(known.columns.keys())
        missing = set(table.columns) - columns
        if missing:
            raise Conflict(
                f"The backup is of a newer version: this one has no {table.name}.{min(missing)}. "
                "Restore it with the version that made it, or a newer one."
            )


def _drop_foreign_keys(connection: psycopg.Connection) -> list[tuple[str, str, str]]:
    """Drop them; return table, name and definition of each."""
    rows = connection.execute(
        """
        SELECT r.relname::text, c.conname::text, pg_get_constraintdef(c.oid)
        FROM pg_constraint c JOIN pg_class r ON r.oid = c.conrelid
        WHERE c.contype = 'f' AND c.connamespace = 'public'::regnamespace ORDER BY 1, 2
        """
    ).fetchall()
    for table, name, _ in rows:
        connection.execute(
            sql.SQL("ALTER TABLE {} DROP CONSTRAINT {}").format(
                sql.Identifier(table), sql.Identifier(name)
            )
        )
    return rows


def _load(connection: psycopg.Connection, table: DumpedTable, directory: Path) -> None:
    columns = sql.SQL(", ").join(map(sql.Identifier, table.columns))
    query = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(table.name), columns)
    digest = hashlib.sha256()
    with (
        gzip.open(table_file(directory, table.name), "rb") as file,
        connection.cursor() as cursor,
        cursor.copy(query) as copy,
    ):
        while block := file.read(_READ_BYTES):
            digest.update(block)
            copy.write(block)
    if digest.hexdigest() != table.sha256:
        raise Conflict(f"The backup is damaged: the rows of {table.name} do not match their hash.")


def _advance_identities(connection: psycopg.Connection) -> None:
    """Let every generated number go on after the largest that was loaded."""
    rows = connection.execute(
        """
        SELECT table_name::text, column_name::text FROM information_schema.columns
        WHERE table_schema = 'public' AND is_identity = 'YES'
        """
    ).fetchall()
    for table, column in rows:
        connection.execute(
            sql.SQL(
                "SELECT setval(pg_get_serial_sequence({}, {}), GREATEST(1, COALESCE(max({}), 1)))"
                " FROM {}"
            ).format(
                sql.Literal(table),
                sql.Literal(column),
                sql.Identifier(column),
                sql.Identifier(table),
            )
        )
