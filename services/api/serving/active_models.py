"""The models that serve, one per alias, and the atomic swap.

A swap replaces one reference. Users of the previous model hold a reference to it, and releasing the last
one closes its engine, so a running batch always finishes on the model that it started with.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from services.api.serving.encoder import Encoder
from services.api.serving.engines.engine import Engine
from services.api.serving.engines.malloc import collect_and_trim
from services.api.serving.errors import NoActiveModel
from services.api.serving.prediction import Calibration
from services.shared.datasets.card import Head

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class ActiveModel:
    """A loaded, warmed-up student with what is needed to encode texts and interpret logits."""

    name: str
    version: str
    model_id: str
    heads: list[Head]
    max_length: int
    encoder: Encoder
    engine: Engine
    calibration: Calibration = field(default_factory=Calibration)
    backbone: str = ""  # hash of everything but the heads: models with equal hashes share weights

    _references: int = field(default=0, init=False, repr=False)
    _retired: bool = field(default=False, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    closed: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def acquire(self) -> bool:
        """Keep the engine open until `release`; return False if it may be closed already."""
        with self._lock:
            if self._retired and self._references == 0:
                return False
            self._references += 1
            return True

    def release(self) -> None:
        """Drop a reference; dropping the last one of a retired model closes it."""
        with self._lock:
            self._references -= 1
            assert self._references >= 0, "released more often than acquired"
            is_unused = self._retired and self._references == 0
        if is_unused:
            self._close_in_background()

    def retire(self) -> None:
        """Close the model as soon as it has no references."""
        with self._lock:
            if self._retired:
                return
            self._retired = True
            is_unused = self._references == 0
        if is_unused:
            self._close_in_background()

    def _close_in_background(self) -> None:
        # Freeing gigabytes would block the event loop for too long. Not a daemon thread: Python would
        # kill one inside torch at exit, which aborts the process.
        threading.Thread(target=self._close, name="close-model").start()

    def _close(self) -> None:
        self.engine.close()
        collect_and_trim()
        self.closed.set()
        log.info("student_closed", model=self.name, version=self.version)


class ActiveModels:
    """Maps each alias to the model that serves it."""

    def __init__(self) -> None:
        self._models: dict[str, ActiveModel] = {}
        self._lock = threading.Lock()  # between writers; readers see one complete mapping

    def get(self, alias: str = "default") -> ActiveModel | None:
        """Return the model that serves `alias` now."""
        return self._models.get(alias)

    def aliases(self) -> Sequence[str]:
        """Return the aliases that are served now."""
        return list(self._models)

    def lease(self, alias: str = "default") -> ActiveModel:
        """Return the active model, acquired; the caller releases it. Raises NoActiveModel."""
        while True:
            model = self._models.get(alias)
            if model is None:
                raise NoActiveModel(alias)
            if model.acquire():
                return model

    def swap(self, alias: str, model: ActiveModel | None) -> None:
        """Let `model` serve `alias` from now on (None: no model does) and retire the previous one."""
        with self._lock:
            models = dict(self._models)
            previous = models.pop(alias, None)
            if model is not None:
                models[alias] = model
            self._models = models
            still_serves = previous in models.values()
        if previous is not None and not still_serves:
            previous.retire()
