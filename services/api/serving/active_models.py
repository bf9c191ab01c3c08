"""The students that serve, one an alias, and the atomic swap.

A swap replaces one reference. Whoever works with the former student holds it; the last to let go
closes its engine, so a running batch always ends on the student that it began with.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from services.api.serving.encoder import Encoder
from services.api.serving.engines.engine import Engine
from services.api.serving.engines.malloc import return_memory
from services.api.serving.errors import NoStudent
from services.api.serving.prediction import Calibration
from services.shared.datasets.card import Head

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class ActiveStudent:
    """A student that is loaded and warm, with what is needed to read texts and logits."""

    name: str
    version: str
    model_id: str
    heads: list[Head]
    max_length: int
    encoder: Encoder
    engine: Engine
    calibration: Calibration = field(default_factory=Calibration)
    backbone: str = (
        ""  # hash of all that is not heads: students with the same one can share weights
    )

    _holders: int = field(default=0, init=False, repr=False)
    _retired: bool = field(default=False, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    closed: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def hold(self) -> bool:
        """Keep the engine open until `release`; False if it may be closed already."""
        with self._lock:
            if self._retired and self._holders == 0:
                return False
            self._holders += 1
            return True

    def release(self) -> None:
        """Let go; the last one to let go of a retired student closes it."""
        with self._lock:
            self._holders -= 1
            assert self._holders >= 0, "released more often than held"
            idle = self._retired and self._holders == 0
        if idle:
            self._close_aside()

    def retire(self) -> None:
        """Take no new holders once the present ones are gone, and close then."""
        with self._lock:
            if self._retired:
                return
            self._retired = True
            idle = self._holders == 0
        if idle:
            self._close_aside()

    def _close_aside(self) -> None:
        # Freeing gigabytes takes longer than an event loop may stand still. Not a daemon: Python would
        # tear one down inside torch at exit, which aborts the process.
        threading.Thread(target=self._close, name="close-student").start()

    def _close(self) -> None:
        self.engine.close()
        return_memory()
        self.closed.set()
        log.info("student_closed", model=self.name, version=self.version)


class Slot:
    """Holds one active student an alias."""

    def __init__(self) -> None:
        self._students: dict[str, ActiveStudent] = {}
        self._lock = threading.Lock()  # between writers; readers see one whole mapping

    def active(self, alias: str = "default") -> ActiveStudent | None:
        """Return the student that serves `alias` now."""
        return self._students.get(alias)

    def aliases(self) -> Sequence[str]:
        """Return the aliases that are served now."""
        return list(self._students)

    def lease(self, alias: str = "default") -> ActiveStudent:
        """Return the active student, held; the caller releases it. Raises NoStudent."""
        while True:
            student = self._students.get(alias)
            if student is None:
                raise NoStudent(alias)
            if student.hold():
                return student

    def swap(self, alias: str, student: ActiveStudent | None) -> None:
        """Let `student` serve `alias` from now on (None: nobody) and retire the former one."""
        with self._lock:
            students = dict(self._students)
            former = students.pop(alias, None)
            if student is not None:
                students[alias] = student
            self._students = students
            still_serves = former in students.values()
        if former is not None and not still_serves:
            former.retire()
