"""What each process of the API serves is recorded, and shown as long as it runs."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import text

from services.shared.jobs.db.connection import transaction
from services.shared.jobs.db.processes import ServingProcess, process_name
from tests.jobs.conftest import StoreDriver


def shown(driver: StoreDriver, promotion_id: str) -> dict[str, str]:
    """Return the outcome of a promotion by process, from both places that show it."""
    promotions = {each.id: each for each in driver.store.promotions().items}
    promotion = promotions[promotion_id]
    if promotion.serving is None:
        return {}
    [model] = driver.store.list_models().items
    newest = max(
        (each for each in promotions.values() if each.alias == promotion.alias),
        key=lambda each: each.seq,
    )
    if newest.id == promotion_id:
        assert model.serving[promotion.alias] == promotion.serving
    return {each.process: each.outcome for each in promotion.serving.processes}


@pytest.fixture
def processes(driver: StoreDriver) -> tuple[ServingProcess, ServingProcess]:
    return ServingProcess(driver.store.engine, "a"), ServingProcess(driver.store.engine, "b")


Two = tuple[ServingProcess, ServingProcess]


def test_each_process_is_listed_with_what_it_made_of_a_promotion(
    driver: StoreDriver, processes: Two
) -> None:
    one, two = processes
    promotion = driver.store.promote(driver.succeed(driver.running())).id
    driver.store.report_served(promotion, engine="packed-bfloat16")
    one.report(promotion, engine="packed-bfloat16")
    assert shown(driver, promotion) == {"a": "served"}
    two.report(promotion, refused="Too many open files", transient=True)
    assert shown(driver, promotion) == {"a": "served", "b": "refused"}
    two.report(promotion, engine="packed-bfloat16")
    assert shown(driver, promotion) == {"a": "served", "b": "served"}


def test_a_process_that_serves_a_newer_promotion_no_longer_serves_the_former(
    driver: StoreDriver, processes: Two
) -> None:
    one, _two = processes
    model = driver.succeed(driver.running())
    first, other = (driver.store.promote(model, alias=alias).id for alias in ("default", "canary"))
    for promotion in (first, other):
        driver.store.report_served(promotion, engine="e")
        for process in processes:
            process.report(promotion, engine="e")
    second = driver.store.promote(model).id
    driver.store.report_served(second, engine="e")
    one.report(second, engine="e")
    assert shown(driver, first) == {"b": "served"}
    assert shown(driver, second) == {"a": "served"}
    assert shown(driver, other) == {"a": "served", "b": "served"}


def test_a_process_that_ended_or_is_silent_is_not_listed(
    driver: StoreDriver, processes: Two
) -> None:
    one, two = processes
    promotion = driver.store.promote(driver.succeed(driver.running())).id
    driver.store.report_served(promotion, engine="e")
    for process in processes:
        process.report(promotion, engine="e")
    one.leave()
    assert shown(driver, promotion) == {"b": "served"}
    _let_pass(driver, timedelta(minutes=1))
    assert shown(driver, promotion) == {}
    two.beat()
    assert shown(driver, promotion) == {"b": "served"}
    _let_pass(driver, timedelta(hours=2))
    ServingProcess(driver.store.engine, "c").beat()
    two.beat()  # its rows are gone: the table does not grow by processes that ended
    assert shown(driver, promotion) == {}


def _let_pass(driver: StoreDriver, time: timedelta) -> None:
    with transaction(driver.store.engine) as session:
        session.execute(text("UPDATE api_processes SET seen_at = seen_at - :t"), {"t": time})


def test_no_two_processes_have_one_name() -> None:
    assert process_name() != process_name()
