"""Connections for whole tables: no statement timeout, and COPY, which SQLAlchemy does not offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from psycopg import sql

from services.shared.jobs.errors import Unavailable

_OPTIONS = "-c timezone=UTC -c statement_timeout=0 -c lock_timeout=0"
_VERSION_TABLE = "alembic_version"


@contextmanager
def connect(database_url: str) -> Iterator[psycopg.Connection]:
    """Open a connection; its block is one transaction. Raises Unavailable."""
    url = database_url.replace("postgresql+psycopg://", "postgresql://", 1)
    try:
        with psycopg.connect(url, options=_OPTIONS, connect_timeout=5) as connection:
            yield connection
    except psycopg.OperationalError as error:
        cause = str(error).strip().splitlines()
        raise Unavailable(f"The database does not answer: {cause[0] if cause else ''}") from error


@dataclass(frozen=True)
class TableShape:
    """A table, its columns, and the columns of its primary key."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]


def table_shapes(connection: psycopg.Connection) -> list[TableShape]:
    """Return every table but that of the schema's version, by name."""
    rows = connection.execute(
        """
        SELECT c.table_name, array_agg(c.column_name::text ORDER BY c.ordinal_position)
        FROM information_schema.columns c
        JOIN information_schema.tables t USING (table_schema, table_name)
        WHERE c.table_schema = 'public' AND t.table_type = 'BASE TABLE' AND c.table_name <> %s
        GROUP BY c.table_name ORDER BY c.table_name
        """,
        [_VERSION_TABLE],
    ).fetchall()
    return [TableShape(name, tuple(columns), _key(connection, name)) for name, columns in rows]


def schema_revision(connection: psycopg.Connection) -> str:
    """Return the version of the schema. Raises Unavailable for a database that was never migrated."""
    query = sql.SQL("SELECT version_num FROM {}").format(sql.Identifier(_VERSION_TABLE))
    try:
        row = connection.execute(query).fetchone()
    except psycopg.errors.UndefinedTable as error:
        raise Unavailable("The database was never migrated.") from error
    assert row is not None
    return str(row[0])


def _key(connection: psycopg.Connection, table: str) -> tuple[str, ...]:
    rows = connection.execute(
        """
        SELECT a.attname::text FROM pg_index i
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
        WHERE i.indrelid = (quote_ident(%s))::regclass AND i.indisprimary
        ORDER BY array_position(i.indkey::int2[], a.attnum)
        """,
        [table],
    ).fetchall()
    return tuple(name for (name,) in rows)
