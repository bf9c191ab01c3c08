"""Which model the watcher activates, for every sequence of promotions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from services.api.serving.active_models import ActiveModel, ActiveModels
from services.api.serving.promotion import Promotion, StudentRefused
from services.api.serving.rollout.promotion_watcher import RETRY_SECONDS, PromotionWatcher
from services.shared.jobs.gates import Int8Gate
from tests.api.serving.fakes import CountingEngine, make_student


def promotion_of(number: int, model: str, *, alias: str = "default") -> Promotion:
    return Promotion(f"prm_{number}", alias, model, model, model, Path("artifacts") / model)


class Registry:
    """Promotions, newest first, and models that may fail to load; records what it is notified of."""

    def __init__(self) -> None:
        self.promotions: list[Promotion] = []
        self.loaded: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.now = 0.0
        self.refusals: list[tuple[str, str]] = []
        self.served: list[tuple[str, str]] = []
        self.on_load: Callable[[], None] = lambda: None
        self.engines: list[CountingEngine] = []

    def promote(self, model: str, *, alias: str = "default") -> None:
        self.promotions.insert(0, promotion_of(len(self.promotions) + 1, model, alias=alias))

    def load(self, promotion: Promotion) -> ActiveModel:
        self.loaded.append(promotion.model_id)
        self.on_load()
        if promotion.model_id in self.broken:
            raise self.broken[promotion.model_id]
        self.engines.append(CountingEngine())
        return make_student(self.engines[-1], version=promotion.version)

    def on_served(self, promotion: Promotion, *, engine: str) -> None:
        self.served.append((promotion.promotion_id, engine))

    def on_refused(self, promotion: Promotion, reason: str, *, transient: bool) -> None:
        self.refusals.append((promotion.promotion_id, reason))

    def on_int8_gate(self, promotion: Promotion, gate: Int8Gate) -> None:
        raise AssertionError("the watcher quantizes nothing")

    def watcher(self, active_models: ActiveModels) -> PromotionWatcher:
        return PromotionWatcher(
            active_models,
            promotions=lambda: list(self.promotions),
            load=self.load,
            poll_seconds=0.01,
            listener=self,
            clock=lambda: self.now,
        )


@pytest.fixture
def registry() -> Registry:
    return Registry()


def serving(active_models: ActiveModels, alias: str = "default") -> str | None:
    student = active_models.get(alias)
    return None if student is None else student.version


def test_the_newest_promotion_serves_and_is_loaded_once(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    assert not watcher.poll()
    registry.promote("a")
    assert watcher.poll()
    assert not watcher.poll()
    registry.promote("b")
    assert watcher.poll()
    assert serving(active_models) == "b"
    assert registry.loaded == ["a", "b"]
    assert registry.served == [("prm_1", "counting"), ("prm_2", "counting")]


def test_promoting_the_previous_model_again_rolls_back(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    for model in ("a", "b", "a"):
        registry.promote(model)
        watcher.poll()
    assert serving(active_models) == "a"


def test_promoting_the_active_model_again_loads_nothing(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.promote("a")
    watcher.poll()
    registry.promote("a")
    watcher.poll()
    watcher.poll()
    assert registry.loaded == ["a"]
    assert not registry.engines[0].is_closed


def test_a_refused_student_never_serves_and_is_reported_once(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.promote("a")
    watcher.poll()
    registry.broken["b"] = StudentRefused("answers differently")
    registry.promote("b")
    watcher.poll()
    watcher.poll()
    assert serving(active_models) == "a"
    assert registry.loaded == ["a", "b"]
    assert registry.refusals == [("prm_2", "answers differently")]


def test_after_a_restart_the_last_student_that_loads_serves(registry: Registry) -> None:
    registry.promote("a")
    registry.promote("b")
    registry.broken["b"] = ValueError("not an artifact")
    active_models = ActiveModels()
    registry.watcher(active_models).poll()
    assert serving(active_models) == "a"
    assert registry.refusals == [("prm_2", "ValueError: not an artifact")]


def test_a_promotion_refused_for_memory_is_retried_later(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.broken["a"] = StudentRefused("not enough memory", transient=True)
    registry.promote("a")
    watcher.poll()
    del registry.broken["a"]
    watcher.poll()
    assert serving(active_models) is None
    registry.now = RETRY_SECONDS
    watcher.poll()
    assert serving(active_models) == "a"


def test_an_alias_whose_promotions_are_gone_stops_serving(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.promote("a")
    watcher.poll()
    registry.promotions.clear()
    assert watcher.poll()
    assert serving(active_models) is None


def test_two_aliases_of_one_model_share_the_weights(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.promote("a")
    registry.promote("a", alias="challenger")
    watcher.poll()
    assert registry.loaded == ["a"]
    assert active_models.get("challenger") is active_models.get("default")


def test_the_thread_survives_an_unavailable_database(registry: Registry) -> None:
    active_models = ActiveModels()
    errors = [ConnectionError("away")]

    def promotions() -> list[Promotion]:
        if errors:
            raise errors.pop()
        return [promotion_of(1, "a")]

    watcher = PromotionWatcher(
        active_models, promotions=promotions, load=registry.load, poll_seconds=0.001
    )
    loaded = threading.Event()
    registry.on_load = loaded.set
    watcher.start()
    assert loaded.wait(20)
    watcher.stop()
    assert registry.loaded == ["a"]


def test_a_reload_replaces_the_model_on_every_alias_it_serves(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.promote("a")
    registry.promote("a", alias="challenger")
    watcher.poll()
    previous = active_models.get()
    watcher.reload("mdl_unknown")
    assert not watcher.poll()
    watcher.reload("a")
    assert watcher.poll()
    assert active_models.get() is active_models.get("challenger")
    assert active_models.get() is not previous
    assert previous is not None
    assert previous.closed.wait(20)
    assert sorted(registry.served[2:]) == [("prm_1", "counting"), ("prm_2", "counting")]


def test_a_refused_reload_leaves_the_model_in_place(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.promote("a")
    watcher.poll()
    previous = active_models.get()
    registry.broken["a"] = StudentRefused("not enough memory", transient=True)
    watcher.reload("a")
    assert not watcher.poll()
    assert active_models.get() is previous
    assert registry.refusals == []  # the promotion keeps serving


def test_the_default_alias_is_loaded_first_and_a_new_promotion_does_not_wait_for_all(
    registry: Registry,
) -> None:
    for number in range(700):
        registry.promote(f"mdl_{number}", alias=f"alias-{number}")
    registry.promotions.append(promotion_of(0, "mdl_default"))  # the oldest

    def take_a_second() -> None:
        registry.now += 1

    registry.on_load = take_a_second
    watcher = registry.watcher(ActiveModels())
    assert watcher.poll()
    assert registry.loaded == ["mdl_default"]
    registry.promote("mdl_new")
    assert watcher.poll()
    assert registry.loaded == ["mdl_default", "mdl_new"]
    assert watcher.poll()
    assert registry.loaded[2:] == ["mdl_699"]
