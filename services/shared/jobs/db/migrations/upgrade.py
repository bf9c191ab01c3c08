"""Brings the database's schema to the newest version."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.exc import OperationalError

from services.shared.jobs.errors import Unavailable

URL_OPTION = "database_url"


class _DatabaseSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="STILLHOUSE_")

    database_url: str


def migrate(database_url: str) -> None:
    """Apply every migration that is missing; harmless to repeat and to run twice at once.

    Raises Unavailable when the database cannot be reached.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes[URL_OPTION] = database_url
    try:
        command.upgrade(config, "head")
    except OperationalError as error:
        raise Unavailable(f"The database cannot be migrated: {error.orig}") from error


def database_url_of_environment() -> str:
    """Return STILLHOUSE_DATABASE_URL; raises pydantic's ValidationError where it is not set."""
    return _DatabaseSettings().database_url
