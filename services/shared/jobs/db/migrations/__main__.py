"""`python -m services.shared.jobs.db.migrations`: migrate STILLHOUSE_DATABASE_URL and leave."""

from __future__ import annotations

from services.shared.jobs.db.migrations.upgrade import database_url_of_environment, migrate

migrate(database_url_of_environment())
