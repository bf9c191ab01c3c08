"""What the database itself refuses, and what is said when it is away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import delete, event, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from services.cli.embedded.servers import Server, start_postgres
from services.shared.jobs.db.connection import create_engine, transaction
from services.shared.jobs.db.migrations.upgrade import migrate
from services.shared.jobs.db.store import Store
from services.shared.jobs.db.tables import JobRow, PromotionRow
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.state import JobState

if TYPE_CHECKING:
    from pathlib import Path

    from tests.jobs.conftest import StoreDriver


@pytest.mark.parametrize(
    ("state", "columns", "constraint"),
    [
        ("queued", {"state": "lost"}, "jobs_state_known"),
        ("queued", {"kind": "student"}, "jobs_kind_known"),
        ("succeeded", {"ended_at": None}, "jobs_ended_when_terminal"),
        ("queued", {"ended_at": "now"}, "jobs_ended_when_terminal"),
        ("failed", {"reason": None}, "jobs_reason_when_not_succeeded"),
        ("cancelled", {"reason": None}, "jobs_reason_when_not_succeeded"),
        ("succeeded", {"reason": "crashed"}, "jobs_reason_when_not_succeeded"),
        ("running", {"token": None}, "jobs_leased_while_running"),
        ("running", {"lease_until": None}, "jobs_leased_while_running"),
        ("cancelling", {"worker": None}, "jobs_leased_while_running"),
        ("queued", {"token": "t"}, "jobs_leased_while_running"),
        ("waiting", {"parent_job_id": None}, "jobs_waits_for_a_parent"),
        ("running", {"started_at": None}, "jobs_started_when_running"),
        ("queued", {"used_attempts": -1}, "jobs_attempts_in_bounds"),
        ("queued", {"attempt": -1}, "jobs_attempts_in_bounds"),
        ("queued", {"max_attempts": 0}, "jobs_attempts_in_bounds"),
        ("running", {"used_attempts": 2}, "jobs_attempts_in_bounds"),
        ("queued", {"retry_of": "itself"}, "jobs_not_its_own_relative"),
    ],
)
def test_an_inconsistent_row_is_refused(
    driver: StoreDriver, state: str, columns: dict[str, Any], constraint: str
) -> None:
    job_id = driver.in_state(JobState(state))
    values = {name: job_id if value == "itself" else value for name, value in columns.items()}
    with (
        pytest.raises(IntegrityError, match=constraint),
        transaction(driver.store.engine) as session,
    ):
        session.execute(update(JobRow).where(JobRow.id == job_id).values(**values))


@pytest.mark.parametrize(
    "statement",
    [
        update(PromotionRow).values(alias="other"),
        delete(PromotionRow),
        text("TRUNCATE promotions CASCADE"),
    ],
)
def test_promotions_are_never_rewritten(driver: StoreDriver, statement: Any) -> None:
    driver.store.promote(driver.succeed(driver.running()))
    with (
        pytest.raises(DBAPIError, match="promotions is append-only"),
        transaction(driver.store.engine) as session,
    ):
        session.execute(statement)
    assert len(driver.store.promotions().items) == 1


def test_a_closed_port_is_unavailable(tmp_path: Path) -> None:
    url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    settings = JobSettings(database_url=url, broker_url="redis://127.0.0.1:1/0", data_dir=tmp_path)
    with pytest.raises(Unavailable, match="The database does not answer"):
        Store(create_engine(url), settings).ping()


def test_the_store_survives_a_restart_of_the_database(tmp_path: Path) -> None:
    def start() -> Server:
        return start_postgres(tmp_path, durable=False)

    server = start()
    migrate(server.url)
    settings = JobSettings(
        database_url=server.url, broker_url="redis://127.0.0.1:1/0", data_dir=tmp_path
    )
    store = Store(create_engine(server.url), settings)
    assert store.list_jobs().items == []
    server.stop()
    with pytest.raises(Unavailable):
        store.list_jobs()
    server = start()
    try:
        assert store.list_jobs().items == []
    finally:
        store.engine.dispose()
        server.stop()


def test_the_url_may_name_any_driver() -> None:
    engine = create_engine("postgresql://user@host/name")
    assert engine.dialect.driver == "psycopg"


@pytest.mark.parametrize(
    ("statement", "sqlstate"),
    [
        ("SET TRANSACTION READ ONLY; UPDATE jobs SET worker = worker WHERE false", "25006"),
        ("SET LOCAL statement_timeout = '10ms'; SELECT pg_sleep(5)", "57014"),
        ("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '53100'; END $$", "53100"),
        ("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '25P03'; END $$", "25P03"),
        ("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '57P01'; END $$", "57P01"),
    ],
)
def test_a_server_that_cannot_write_now_is_unavailable(
    driver: StoreDriver, statement: str, sqlstate: str
) -> None:
    parts = [statement] if "$$" in statement else statement.split("; ", 1)
    with pytest.raises(Unavailable) as refusal:
        _run(driver, parts)
    assert getattr(refusal.value.__cause__.orig, "sqlstate", None) == sqlstate  # type: ignore[union-attr]


def _run(driver: StoreDriver, statements: list[str]) -> None:
    with transaction(driver.store.engine) as session:
        for statement in statements:
            session.execute(text(statement))


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 1 / 0",
        "SELECT CAST('hush-token' AS integer)",
        "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '54000'; END $$",
    ],
)
def test_refused_data_is_no_outage_and_its_error_shows_no_sql(
    driver: StoreDriver, statement: str
) -> None:
    with pytest.raises(DBAPIError) as refusal, transaction(driver.store.engine) as session:
        session.execute(text(statement + " -- :token"), {"token": "hush-token-2"})
    assert "[SQL" not in str(refusal.value)
    assert "hush-token-2" not in str(refusal.value)


def test_a_read_only_database_is_not_ready(driver: StoreDriver) -> None:
    engine = create_engine(driver.store.engine.url.render_as_string(hide_password=False))
    store = Store(engine, driver.store.settings)
    store.ping()
    engine.dispose()

    @event.listens_for(engine, "connect")
    def make_read_only(connection: Any, _: object) -> None:
        connection.execute("SET default_transaction_read_only = on")
        connection.commit()

    with pytest.raises(Unavailable, match="read-only"):
        store.ping()
    engine.dispose()
