"""A clock for a whole database: `now()` and the defaults of columns show a time that can be moved forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psycopg
from psycopg import sql


class DatabaseClock:
    """Moves the time of every new connection to a database.

    `now()` is found in a schema before pg_catalog, and adds a shift to the real time.
    """

    def __init__(self, database_url: str) -> None:
        self._url = database_url.replace("+psycopg", "")
        with self._connection() as connection:
            connection.execute("CREATE SCHEMA clock")
            connection.execute("CREATE TABLE clock.shift (value INTERVAL NOT NULL)")
            connection.execute("INSERT INTO clock.shift VALUES ('0')")
            connection.execute(
                "CREATE FUNCTION clock.now() RETURNS timestamptz LANGUAGE sql STABLE AS"
                " 'SELECT pg_catalog.now() + value FROM clock.shift'"
            )
            _use_in_defaults(connection)
            name = connection.info.dbname
            connection.execute(
                sql.SQL("ALTER DATABASE {} SET search_path = clock, pg_catalog, public").format(
                    sql.Identifier(name)
                )
            )

    def advance(self, by: timedelta) -> None:
        """Move the time forward."""
        with self._connection() as connection:
            connection.execute("UPDATE clock.shift SET value = value + %s", [by])

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self._url, autocommit=True) as connection:
            yield connection


def _use_in_defaults(connection: psycopg.Connection) -> None:
    columns = connection.execute(
        "SELECT table_name, column_name FROM information_schema.columns"
        " WHERE table_schema = 'public' AND column_default = 'now()'"
    ).fetchall()
    assert columns
    for table, column in columns:
        connection.execute(
            sql.SQL("ALTER TABLE public.{} ALTER COLUMN {} SET DEFAULT clock.now()").format(
                sql.Identifier(table), sql.Identifier(column)
            )
        )
