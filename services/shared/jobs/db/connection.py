"""The connection to Postgres; its loss becomes Unavailable here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, event, func, make_url, select
from sqlalchemy import create_engine as _create_engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import ORMExecuteState, Session, with_loader_criteria

from services.shared.jobs.db.tables import OwnedByProject
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
        hide_parameters=True,  # an error's text may be shown; parameters hold lease tokens
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


class ProjectSession(Session):
    """A session that sees only the rows of the project in its `info`; those of all projects for None."""


@event.listens_for(ProjectSession, "do_orm_execute")
def _filter_by_project(statement: ORMExecuteState) -> None:
    """Add the project to every query, so that none can forget it."""
    project = statement.session.info["project"]
    if project is not None and not statement.is_insert:
        owned = with_loader_criteria(
            OwnedByProject, lambda row: row.project == project, include_aliases=True
        )
        statement.statement = statement.statement.options(owned)


@contextmanager
def transaction(engine: Engine, *, project: str | None = None) -> Iterator[Session]:
    """Open a session on the rows of a project (None: of all), commit at the end, roll back on an exception.

    Raises Unavailable when the database cannot be reached, does not answer in time or accepts no
    writes for now. Any other error of the database is a fault of ours and passes, without its SQL.
    """
    try:
        with (
            ProjectSession(engine, expire_on_commit=False, info={"project": project}) as session,
            session.begin(),
        ):
            yield session
    except PoolTimeoutError as error:
        raise Unavailable(f"The database does not answer: {error}") from error
    except DBAPIError as error:
        cause = str(error.orig).strip().splitlines()
        if is_outage(error):
            raise Unavailable(
                f"The database does not answer: {cause[0] if cause else ''}"
            ) from error
        if getattr(error.orig, "sqlstate", None) in _NOT_MIGRATED:
            raise Unavailable("The database lacks tables or columns of this version") from error
        error.statement = error.params = None
        raise


@contextmanager
def session_lock(engine: Engine, key: int) -> Iterator[bool]:
    """Try an advisory lock for the block, however long it takes; yield whether it is held.

    No transaction is open meanwhile. Without a database the lock is not held.
    """
    try:
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    except (DBAPIError, PoolTimeoutError):
        yield False
        return
    with connection:
        try:
            is_held = bool(connection.scalar(select(func.pg_try_advisory_lock(key))))
        except DBAPIError:
            is_held = False
        try:
            yield is_held
        finally:
            try:
                connection.execute(select(func.pg_advisory_unlock_all()))
            except DBAPIError:  # the server has released the lock with the connection
                connection.invalidate()


_NOT_MIGRATED = ("42P01", "42703")  # undefined table, undefined column
# SQLSTATE classes and codes of a server that will accept the same statement later.
_OUTAGE_CLASSES = (
    "08",
    "53",
    "58",
)  # connection, resources (disk, memory, connections), system error
_OUTAGE_STATES = frozenset(
    {
        "25006",  # read-only transaction: a standby, or a full disk that an operator has fenced off
        "25P03",  # idle in transaction for too long
        "25P04",  # transaction timeout
        "40001",  # serialization failure
        "40P01",  # deadlock
        "55P03",  # lock timeout
        "57014",  # statement timeout
        "57P01",  # shutdown by an administrator
        "57P02",  # crash of another backend
        "57P03",  # starting up
        "57P04",  # database dropped
        "57P05",  # idle session timeout
    }
)


def is_outage(error: DBAPIError) -> bool:
    """Return whether the server, not the statement or its data, is the reason of an error.

    An error without an SQLSTATE comes from the connection itself.
    """
    state = getattr(error.orig, "sqlstate", None)
    if state is None:
        return isinstance(error, OperationalError | InterfaceError)
    return state in _OUTAGE_STATES or state.startswith(_OUTAGE_CLASSES)
