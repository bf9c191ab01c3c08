"""The migrated schema and the declared tables are the same."""

from __future__ import annotations

import os
import subprocess
import sys

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from services.cli.embedded.servers import Server
from services.shared.jobs.db.connection import create_engine
from services.shared.jobs.db.migrations.upgrade import migrate
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
    assert versions == [("0006",)]


def test_a_database_that_cannot_be_reached_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        migrate("postgresql+psycopg://nobody@127.0.0.1:1/none")
