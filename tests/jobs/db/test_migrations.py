"""The migrated schema and the declared tables are the same."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.orm import Session

from services.cli.embedded.servers import Server
from services.shared.jobs.db.connection import create_engine
from services.shared.jobs.db.migrations.upgrade import migrate
from services.shared.jobs.db.schema_version import check_schema_version
from services.shared.jobs.db.tables import Table
from services.shared.jobs.errors import Unavailable


def test_the_migrated_schema_is_the_declared_one(database_url: str) -> None:
    engine = create_engine(database_url)
    with engine.connect() as connection:
        difference = compare_metadata(
            MigrationContext.configure(connection, opts={"compare_type": True}), Table.metadata
        )
    engine.dispose()
    assert difference == []


def test_every_check_constraint_is_declared_and_migrated(database_url: str) -> None:
    declared = {
        constraint.name
        for table in Table.metadata.tables.values()
        for constraint in table.constraints
        if type(constraint).__name__ == "CheckConstraint"
    }
    with psycopg.connect(database_url.replace("+psycopg", "")) as connection:
        rows = connection.execute(
            "SELECT conname FROM pg_constraint WHERE contype = 'c'"
            " AND connamespace = 'public'::regnamespace"
        ).fetchall()
    assert {row[0] for row in rows} == declared


def test_repeated_and_concurrent_migrations_are_harmless(migrated: Server) -> None:
    admin = migrated.url.replace("+psycopg", "")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE DATABASE migrated_twice TEMPLATE template0")
    url = migrated.url.replace("/stillhouse?", "/migrated_twice?")
    starters = [
        subprocess.Popen(
            [sys.executable, "-m", "services.shared.jobs.db.migrations"],
            env=os.environ | {"STILLHOUSE_DATABASE_URL": url},
        )
        for _ in range(2)
    ]
    assert [starter.wait(timeout=60) for starter in starters] == [0, 0]
    migrate(url)
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        versions = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    assert versions == [("0008",)]


def test_a_database_that_cannot_be_reached_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        migrate("postgresql+psycopg://nobody@127.0.0.1:1/none")


def test_a_table_that_is_in_use_does_not_hold_a_migration_for_ever(database_url: str) -> None:
    url = database_url.replace("+psycopg", "")
    with psycopg.connect(url) as reader:
        reader.execute("SELECT count(*) FROM jobs")  # holds its lock until the transaction ends
        with pytest.raises(Unavailable, match="lock timeout"):
            migrate(database_url, target="0001", attempts=1)
        reader.rollback()
        migrate(database_url, target="0001")
        migrate(database_url)


def test_a_migration_under_a_running_platform_ends_and_loses_nothing(database_url: str) -> None:
    """Readers and writers take the tables in another order than the migration."""
    url = database_url.replace("+psycopg", "")
    stop = threading.Event()

    def work() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not stop.is_set():
                with contextlib.suppress(psycopg.Error), connection.transaction():
                    connection.execute("UPDATE jobs SET worker = worker")
                    connection.execute("SELECT count(*) FROM models")
                    connection.execute("SELECT count(*) FROM datasets")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        migrate(database_url, target="0001")
        migrate(database_url)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    engine = create_engine(database_url)
    with Session(engine) as session:
        check_schema_version(session)
    engine.dispose()
