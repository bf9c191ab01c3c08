"""Whether the database has the schema that this version of the code needs."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session

from services.shared.jobs.errors import OldSchema

_VERSIONS = "services.shared.jobs.db.migrations.versions"


def check_schema_version(session: Session) -> None:
    """Raise OldSchema where migrations are missing; a newer schema serves an older version too."""
    try:
        found = session.execute(text("SELECT version_num FROM alembic_version")).scalar()
    except ProgrammingError:  # there is no such table
        found = None
    if found is None or int(found) < newest_version():
        raise OldSchema(str(found or "none"), f"{newest_version():04}")


@lru_cache(maxsize=1)
def newest_version() -> int:
    """Return the number of the newest migration, as its file is named: v0005_projects.py."""
    names = [path.name for path in resources.files(_VERSIONS).iterdir()]
    return max(int(name[1:5]) for name in names if name.startswith("v") and name.endswith(".py"))
