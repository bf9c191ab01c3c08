"""The audit log keeps what it has for as long as its retention."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import delete, text, update
from sqlalchemy.exc import DBAPIError

from services.shared.jobs.db.audit import AuditEntry, AuditLog
from services.shared.jobs.db.connection import transaction
from services.shared.jobs.db.tables import AuditRow
from services.shared.jobs.projects import Access
from tests.factories import create_job, succeeded, write_artifact
from tests.jobs.conftest import StoreDriver


@pytest.fixture
def log(driver: StoreDriver) -> AuditLog:
    return AuditLog(driver.store.engine)


def entry(target: str, *, days_ago: float = 0) -> AuditEntry:
    at = datetime.now(timezone.utc) - timedelta(days=days_ago)
    return AuditEntry(
        key_name="ci", action="cancel_job", target=target, outcome="done", created_at=at
    )


@pytest.mark.parametrize(
    "change",
    [update(AuditRow).values(key_name="other"), delete(AuditRow), text("TRUNCATE audit")],
    ids=["update", "delete", "truncate"],
)
def test_no_statement_changes_what_is_recorded(
    driver: StoreDriver, log: AuditLog, change: object
) -> None:
    log.record(entry("job_1"))
    with (
        pytest.raises(DBAPIError, match="append-only"),
        transaction(driver.store.engine) as session,
    ):
        session.execute(change)  # type: ignore[call-overload]
    assert [each.key_name for each in log.page().items] == ["ci"]


def test_only_what_is_older_than_the_retention_expires(log: AuditLog) -> None:
    log.record(entry("old", days_ago=401))
    log.record(entry("young", days_ago=399))
    assert log.expire(older_than=timedelta(days=400)) == 1
    assert [each.target for each in log.page().items] == ["young"]


def test_a_promotion_that_a_job_makes_itself_is_recorded_with_its_key(
    driver: StoreDriver, log: AuditLog
) -> None:
    store = driver.store
    teacher = driver.succeed(driver.running())
    spec = driver.distill_spec({"model_id": teacher}, promote="when_passed")
    job, _ = create_job(store.within(Access(actor="ci")), spec)
    claim = driver.claim(job.id)
    heads = {"sentiment": {"macro_f1": 0.9}}
    write_artifact(driver.settings, claim.model_id)
    assert store.finish(claim, succeeded({"heads": heads, "teacher": {"heads": heads}})).applied
    [promotion] = store.promotions().items
    assert promotion.promoted_by == "ci"
    [recorded] = log.page(target=claim.model_id).items
    assert (recorded.key_name, recorded.action) == ("ci", "promote_model")
    assert recorded.detail == f"requested by job {job.id}"
