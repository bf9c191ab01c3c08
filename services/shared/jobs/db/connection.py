"""The connection to Postgres; its loss becomes Unavailable here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, make_url
from sqlalchemy import create_engine as _create_engine
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from services.shared.jobs.errors import Unavailable

# A cut network must not hold a heartbeat longer than a lease (60 s): the kernel closes
# the connection after 10 s without a response, and the server aborts statements and lock waits itself.
_CONNECT_SECONDS = 5
_TCP_GIVE_UP_MILLISECONDS = 10_000
_SERVER_OPTIONS = (
    "-c timezone=UTC -c statement_timeout=30s -c lock_timeout=10s"
    " -c idle_in_transaction_session_timeout=60s"
)


def create_engine(database_url: str) -> Engine:
    """Return an engine for a Postgres URL, whichever driver the URL names; connects on first use."""
    return _create_engine(
        make_url(database_url).set(drivername="postgresql+psycopg"),
        pool_pre_ping=True,
        pool_size=5,
        max_overflow=15,
        pool_timeout=_CONNECT_SECONDS,
        connect_args={
            "connect_timeout": _CONNECT_SECONDS,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": _TCP_GIVE_UP_MILLISECONDS,
            "options": _SERVER_OPTIONS,
        },
    )


@contextmanager
def transaction(engine: Engine) -> Iterator[Session]:
    """Open a session, commit at the end, roll back on an exception.

    Raises Unavailable when the database cannot be reached or does not answer in time.
    """
    try:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session
    except (OperationalError, InterfaceError, PoolTimeoutError) as error:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()
        raise Unavailable(
            f"The database does not answer: {cause[0] if cause else error}"
        ) from error
