"""Which student the watcher serves, for each course that promotions may take."""

import threading
from pathlib import Path
from typing import Any

import pytest

from services.api.serving.active_models import ActiveModels
from services.api.serving.promotion import Promotion, StudentRefused
from services.api.serving.rollout.promotion_watcher import RETRY_SECONDS, PromotionWatcher
from services.shared.jobs.gates import Int8Gate


def promotion(number: int, model: str, *, alias: str = "default") -> Promotion:
    return Promotion(f"prm_{number}", alias, model, model, model, Path("artifacts") / model)


class Registry:
    """Promotions, newest first, and models that may refuse to load."""

    def __init__(self, new_student: Any) -> None:
        self.promotions: list[Promotion] = []
        self.loaded: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.now = 0.0
        self.refusals: list[tuple[str, str]] = []
        self.served: list[tuple[str, str]] = []
        self.on_load = lambda: None
        self._new_student = new_student

    def promote(self, model: str, *, alias: str = "default") -> None:
        self.promotions.insert(0, promotion(len(self.promotions) + 1, model, alias=alias))

    def load(self, promoted: Promotion) -> Any:
        self.loaded.append(promoted.model_id)
        self.on_load()
        if promoted.model_id in self.broken:
            raise self.broken[promoted.model_id]
        return self._new_student(version=promoted.version)

    def on_served(self, promoted: Promotion, *, engine: str) -> None:
        self.served.append((promoted.promotion_id, engine))

    def on_refused(self, promoted: Promotion, why: str, *, transient: bool) -> None:
        self.refusals.append((promoted.promotion_id, why))

    def on_int8_gate(self, promoted: Promotion, gate: Int8Gate) -> None:
        raise AssertionError("the watcher prepares nothing")

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
def registry(new_student: Any) -> Registry:
    return Registry(new_student)


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


def test_promoting_the_former_model_again_rolls_back(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    for model in ("a", "b", "a"):
        registry.promote(model)
        watcher.poll()
    assert serving(active_models) == "a"


def test_promoting_what_serves_already_loads_nothing(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.promote("a")
    watcher.poll()
    registry.promote("a")
    watcher.poll()
    watcher.poll()
    assert registry.loaded == ["a"]
    student = active_models.get()
    assert student is not None
    assert not student.engine.is_closed  # type: ignore[attr-defined]


def test_a_refused_student_never_serves_and_is_reported_once(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.promote("a")
    watcher.poll()
    registry.broken["b"] = StudentRefused("answers otherwise")
    registry.promote("b")
    watcher.poll()
    watcher.poll()
    assert serving(active_models) == "a"
    assert registry.loaded == ["a", "b"]
    assert registry.refusals == [("prm_2", "answers otherwise")]


def test_after_a_restart_the_last_student_that_loads_serves(registry: Registry) -> None:
    registry.promote("a")
    registry.promote("b")
    registry.broken["b"] = ValueError("not an artifact")
    active_models = ActiveModels()
    registry.watcher(active_models).poll()
    assert serving(active_models) == "a"
    assert registry.refusals == [("prm_2", "ValueError: not an artifact")]


def test_what_was_refused_for_memory_is_tried_again_later(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.broken["a"] = StudentRefused("no room", transient=True)
    registry.promote("a")
    watcher.poll()
    del registry.broken["a"]
    watcher.poll()
    assert serving(active_models) is None
    registry.now = RETRY_SECONDS
    watcher.poll()
    assert serving(active_models) == "a"


def test_an_alias_without_promotion_serves_nothing_any_more(registry: Registry) -> None:
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


def test_the_thread_follows_and_survives_a_database_that_is_away(registry: Registry) -> None:
    active_models = ActiveModels()
    answers: list[Any] = [ConnectionError("away")]

    def promotions() -> list[Promotion]:
        if answers:
            raise answers.pop()
        return [promotion(1, "a")]

    watcher = PromotionWatcher(
        active_models, promotions=promotions, load=registry.load, poll_seconds=0.001
    )
    loaded = threading.Event()
    registry.on_load = loaded.set
    watcher.start()
    assert loaded.wait(20)
    watcher.stop()
    assert registry.loaded == ["a"]


def test_a_reload_replaces_the_student_on_every_alias_it_serves(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.promote("a")
    registry.promote("a", alias="challenger")
    watcher.poll()
    former = active_models.get()
    watcher.reload("mdl_of_nobody")
    assert not watcher.poll()
    watcher.reload("a")
    assert watcher.poll()
    assert active_models.get() is active_models.get("challenger")
    assert active_models.get() is not former
    assert former is not None
    assert former.closed.wait(20)
    assert sorted(registry.served[2:]) == [("prm_1", "counting"), ("prm_2", "counting")]


def test_a_reload_that_is_refused_leaves_the_student_in_place(registry: Registry) -> None:
    active_models = ActiveModels()
    watcher = registry.watcher(active_models)
    registry.promote("a")
    watcher.poll()
    former = active_models.get()
    registry.broken["a"] = StudentRefused("no room", transient=True)
    watcher.reload("a")
    assert not watcher.poll()
    assert active_models.get() is former
    assert registry.refusals == []  # the promotion serves as before
