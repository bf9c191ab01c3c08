"""Brings the database's schema to the newest version."""

from __future__ import annotations

import time
from pathlib import Path

from alembic import command
from alembic.config import Config
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.exc import OperationalError

from services.shared.jobs.db.schema_version import newest_version
from services.shared.jobs.errors import Unavailable

URL_OPTION = "database_url"
NEWEST = "head"
_ATTEMPTS = 20
_PAUSE_SECONDS = 0.5
_IN_USE = ("55P03", "40P01")  # lock timeout, deadlock


class _DatabaseSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="STILLHOUSE_")

    database_url: str


def migrate(database_url: str, *, target: str = NEWEST, attempts: int = _ATTEMPTS) -> None:
    """Apply every migration up to `target`, or revert those after it, in one transaction.

    Harmless to repeat and to run twice at once. A running platform may hold tables: the migration gives
    up its locks and tries again, so that neither waits for the other for ever. Raises Unavailable when
    the database cannot be reached, or when the tables were in use at every attempt.
    """
    config = _config(database_url)
    for attempt in range(1, attempts + 1):
        try:
            _move(config, target)
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) not in _IN_USE or attempt == attempts:
                raise Unavailable(f"The database cannot be migrated: {error.orig}") from error
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def make_schema(database_url: str, *, revision: str) -> None:
    """Make the schema of a version in an empty database. Raises Unavailable."""
    try:
        command.upgrade(_config(database_url), revision)
    except OperationalError as error:
        raise Unavailable(f"The database cannot be migrated: {error.orig}") from error


def _config(database_url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes[URL_OPTION] = database_url
    return config


def _move(config: Config, target: str) -> None:
    if target != NEWEST and target < f"{newest_version():04}":
        command.downgrade(config, target)
    else:
        command.upgrade(config, target)


def database_url_of_environment() -> str:
    """Return STILLHOUSE_DATABASE_URL; raises pydantic's ValidationError where it is not set."""
    return _DatabaseSettings().database_url
