"""What Alembic runs: migrate the database named by the caller, or by STILLHOUSE_DATABASE_URL."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text

from services.shared.jobs.db.connection import create_engine
from services.shared.jobs.db.migrations.upgrade import (
    URL_OPTION,
    database_url_of_environment,
)
from services.shared.jobs.db.tables import Table

# Two starters of the platform may migrate at once; the second waits and finds nothing to do.
_LOCK = 0x5711_4005

engine = create_engine(context.config.attributes.get(URL_OPTION) or database_url_of_environment())
try:
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        # A running API may hold a table, and wait for another that this transaction has locked already.
        connection.execute(text("SET LOCAL lock_timeout = '3s'"))
        context.configure(connection=connection, target_metadata=Table.metadata)
        context.run_migrations()
finally:
    engine.dispose()
