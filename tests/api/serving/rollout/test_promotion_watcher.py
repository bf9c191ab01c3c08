"""Which student the follower serves, for each course that promotions may take."""

import threading
from pathlib import Path
from typing import Any

import pytest

from services.api.serving.active_models import Slot
from services.api.serving.promotion import Promoted, StudentRefused
from services.api.serving.rollout.promotion_watcher import RETRY_SECONDS, Follower
from services.shared.jobs.gates import Int8Gate


def promotion(number: int, model: str, *, alias: str = "default") -> Promoted:
    return Promoted(f"prm_{number}", alias, model, model, model, Path("artifacts") / model)


class Registry:
    """Promotions, newest first, and models that may refuse to load."""

    def __init__(self, new_student: Any) -> None:
        self.promotions: list[Promoted] = []
        self.loaded: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.now = 0.0
        self.refusals: list[tuple[str, str]] = []
        self.told: list[tuple[str, str]] = []
        self.on_load = lambda: None
        self._new_student = new_student

    def promote(self, model: str, *, alias: str = "default") -> None:
        self.promotions.insert(0, promotion(len(self.promotions) + 1, model, alias=alias))

    def load(self, promoted: Promoted) -> Any:
        self.loaded.append(promoted.model_id)
        self.on_load()
        if promoted.model_id in self.broken:
            raise self.broken[promoted.model_id]
        return self._new_student(version=promoted.version)

    def served(self, promoted: Promoted, *, engine: str) -> None:
        self.told.append((promoted.promotion_id, engine))

    def refused(self, promoted: Promoted, why: str, *, transient: bool) -> None:
        self.refusals.append((promoted.promotion_id, why))

    def prepared(self, promoted: Promoted, gate: Int8Gate) -> None:
        raise AssertionError("the follower prepares nothing")

    def follower(self, slot: Slot) -> Follower:
        return Follower(
            slot,
            promotions=lambda: list(self.promotions),
            load=self.load,
            poll_seconds=0.01,
            reports=self,
            clock=lambda: self.now,
        )


@pytest.fixture
def registry(new_student: Any) -> Registry:
    return Registry(new_student)


def serving(slot: Slot, alias: str = "default") -> str | None:
    student = slot.active(alias)
    return None if student is None else student.version


def test_the_newest_promotion_serves_and_is_loaded_once(registry: Registry) -> None:
    slot = Slot()
    follower = registry.follower(slot)
    assert not follower.look()
    registry.promote("a")
    assert follower.look()
    assert not follower.look()
    registry.promote("b")
    assert follower.look()
    assert serving(slot) == "b"
    assert registry.loaded == ["a", "b"]
    assert registry.told == [("prm_1", "counting"), ("prm_2", "counting")]


def test_promoting_the_former_model_again_rolls_back(registry: Registry) -> None:
    slot = Slot()
    follower = registry.follower(slot)
    for model in ("a", "b", "a"):
        registry.promote(model)
        follower.look()
    assert serving(slot) == "a"


def test_promoting_what_serves_already_loads_nothing(registry: Registry) -> None:
    slot = Slot()
    follower = registry.follower(slot)
    registry.promote("a")
    follower.look()
    registry.promote("a")
    follower.look()
    follower.look()
    assert registry.loaded == ["a"]
    student = slot.active()
    assert student is not None
    assert not student.engine.is_closed  # type: ignore[attr-defined]


def test_a_refused_student_never_serves_and_is_reported_once(registry: Registry) -> None:
    slot = Slot()
    follower = registry.follower(slot)
    registry.promote("a")
    follower.look()
    registry.broken["b"] = StudentRefused("answers otherwise")
    registry.promote("b")
    follower.look()
    follower.look()
    assert serving(slot) == "a"
    assert registry.loaded == ["a", "b"]
    assert registry.refusals == [("prm_2", "answers otherwise")]


def test_after_a_restart_the_last_student_that_loads_serves(registry: Registry) -> None:
    registry.promote("a")
    registry.promote("b")
    registry.broken["b"] = ValueError("not an artifact")
    slot = Slot()
    registry.follower(slot).look()
    assert serving(slot) == "a"
    assert registry.refusals == [("prm_2", "ValueError: not an artifact")]


def test_what_was_refused_for_memory_is_tried_again_later(registry: Registry) -> None:
    slot = Slot()
    follower = registry.follower(slot)
    registry.broken["a"] = StudentRefused("no room", transient=True)
    registry.promote("a")
    follower.look()
    del registry.broken["a"]
    follower.look()
    assert serving(slot) is None
    registry.now = RETRY_SECONDS
    follower.look()
    assert serving(slot) == "a"


def test_an_alias_without_promotion_serves_nothing_any_more(registry: Registry) -> None:
    slot = Slot()
    follower = registry.follower(slot)
    registry.promote("a")
    follower.look()
    registry.promotions.clear()
    assert follower.look()
    assert serving(slot) is None


def test_two_aliases_of_one_model_share_the_weights(registry: Registry) -> None:
    slot = Slot()
    follower = registry.follower(slot)
    registry.promote("a")
    registry.promote("a", alias="challenger")
    follower.look()
    assert registry.loaded == ["a"]
    assert slot.active("challenger") is slot.active("default")


def test_the_thread_follows_and_survives_a_database_that_is_away(registry: Registry) -> None:
    slot = Slot()
    answers: list[Any] = [ConnectionError("away")]

    def promotions() -> list[Promoted]:
        if answers:
            raise answers.pop()
        return [promotion(1, "a")]

    follower = Follower(slot, promotions=promotions, load=registry.load, poll_seconds=0.001)
    loaded = threading.Event()
    registry.on_load = loaded.set
    follower.start()
    assert loaded.wait(20)
    follower.stop()
    assert registry.loaded == ["a"]


def test_a_reload_replaces_the_student_on_every_alias_it_serves(registry: Registry) -> None:
    slot = Slot()
    follower = registry.follower(slot)
    registry.promote("a")
    registry.promote("a", alias="challenger")
    follower.look()
    former = slot.active()
    follower.reload("mdl_of_nobody")
    assert not follower.look()
    follower.reload("a")
    assert follower.look()
    assert slot.active() is slot.active("challenger")
    assert slot.active() is not former
    assert former is not None
    assert former.closed.wait(20)
    assert sorted(registry.told[2:]) == [("prm_1", "counting"), ("prm_2", "counting")]


def test_a_reload_that_is_refused_leaves_the_student_in_place(registry: Registry) -> None:
    slot = Slot()
    follower = registry.follower(slot)
    registry.promote("a")
    follower.look()
    former = slot.active()
    registry.broken["a"] = StudentRefused("no room", transient=True)
    follower.reload("a")
    assert not follower.look()
    assert slot.active() is former
    assert registry.refusals == []  # the promotion serves as before
