"""Sees promotions, loads the new student aside, and swaps it in. A thread; torch-free.

Promotions come newest first. The follower serves the newest that loads: where the latest is refused
and nothing serves yet, as after a restart, the one before it serves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import structlog

from services.api.serving.active_models import ActiveStudent, Slot
from services.api.serving.metrics import Measures
from services.api.serving.promotion import NoReports, Promoted, Reports, StudentRefused
from services.shared.jobs.errors import Unavailable

log = structlog.get_logger(__name__)

# A transient refusal (memory) is tried again after so long.
RETRY_SECONDS = 30.0

Load = Callable[[Promoted], ActiveStudent]


class Follower:
    """Keeps a slot in step with the promotions."""

    def __init__(
        self,
        slot: Slot,
        *,
        promotions: Callable[[], Sequence[Promoted]],
        load: Load,
        poll_seconds: float,
        measures: Measures | None = None,
        reports: Reports | None = None,
        on_swapped: Callable[[Promoted], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slot = slot
        self._promotions = promotions
        self._load = load
        self._poll_seconds = poll_seconds
        self._measures = measures or Measures()
        self._reports = reports or NoReports()
        self._on_swapped = on_swapped
        self._clock = clock
        self._serving: dict[str, Promoted] = {}
        self._refused: dict[str, float] = {}  # promotion id -> when to try again
        self._reloads: SimpleQueue[str] = SimpleQueue()  # ids of models
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def start(self) -> None:
        """Begin to look at promotions."""
        self._thread.start()

    def stop(self, *, timeout_seconds: float = 10.0) -> None:
        """Look no more. A load that is under way is waited for until the timeout."""
        self._stop.set()
        self._thread.join(timeout_seconds)

    def reload(self, model_id: str) -> None:
        """Load a model that serves once more: there is a better engine for it now."""
        self._reloads.put(model_id)

    def look(self) -> bool:
        """Act on what is promoted now; True if a student was swapped in or taken out."""
        newest = self._newest(self._promotions())
        changed = False
        while not self._reloads.empty():
            changed |= self._reload(self._reloads.get())
        for alias in [*newest, *(alias for alias in self._serving if alias not in newest)]:
            changed |= self._follow_alias(alias, newest.get(alias, []))
        return changed

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                again = self.look()
            except Unavailable as error:
                # Comes back by itself; what serves goes on serving.
                log.warning("promotions_not_seen", why=str(error))
                again = False
            except Exception:
                log.exception("promotions_not_followed")
                again = False
            if not again:
                self._stop.wait(self._poll_seconds)

    def _follow_alias(self, alias: str, candidates: Sequence[Promoted]) -> bool:
        current = self._serving.get(alias)
        if not candidates:
            if current is not None:
                self._slot.swap(alias, None)
                del self._serving[alias]
            return current is not None
        for wanted in candidates:
            if current is not None and wanted.promotion_id == current.promotion_id:
                return False
            if self._clock() < self._refused.get(wanted.promotion_id, 0.0):
                continue
            student = self._student(wanted)
            if student is None:
                continue
            if self._stop.is_set():
                student.retire()
                return False
            self._slot.swap(alias, student)
            self._serving[alias] = wanted
            self._measures.swaps.labels("swapped").inc()
            log.info("student_swapped_in", alias=alias, model_id=wanted.model_id)
            self._reports.served(wanted, engine=student.engine.kind)
            self._on_swapped(wanted)
            # Something newer may have been promoted while this one loaded: look again at once.
            return True
        return False

    def _student(self, wanted: Promoted) -> ActiveStudent | None:
        """Return the promoted student, shared with an alias that serves it, or loaded; None if refused."""
        for other, serving in self._serving.items():
            active = self._slot.active(other)
            if serving.model_id == wanted.model_id and active is not None:
                return active
        try:
            return self._loaded(wanted)
        except StudentRefused as refusal:
            again = self._clock() + RETRY_SECONDS if refusal.transient else float("inf")
            self._refused[wanted.promotion_id] = again
            self._reports.refused(wanted, str(refusal), transient=refusal.transient)
            return None

    def _reload(self, model_id: str) -> bool:
        """Swap a freshly loaded student in wherever its model serves; keep the present one if refused."""
        aliases = [alias for alias, each in self._serving.items() if each.model_id == model_id]
        if not aliases:
            return False
        try:
            student = self._loaded(self._serving[aliases[0]])
        except StudentRefused:
            return False  # logged; the promotion serves as before
        for alias in aliases:
            self._slot.swap(alias, student)
            self._reports.served(self._serving[alias], engine=student.engine.kind)
        self._measures.swaps.labels("reloaded").inc()
        return True

    def _loaded(self, wanted: Promoted) -> ActiveStudent:
        """Load a student. Raises StudentRefused, which is logged and counted."""
        log.info("student_loading", alias=wanted.alias, model_id=wanted.model_id)
        try:
            return self._load(wanted)
        except StudentRefused as error:
            refusal = error
        except Exception as error:  # noqa: BLE001
            # A boundary: whatever is wrong with an artifact, the former student goes on serving.
            refusal = StudentRefused(f"{type(error).__name__}: {error}")
        log.error("student_refused", alias=wanted.alias, model_id=wanted.model_id, why=str(refusal))
        self._measures.swaps.labels("refused").inc()
        raise refusal

    @staticmethod
    def _newest(promotions: Sequence[Promoted]) -> dict[str, list[Promoted]]:
        by_alias: dict[str, list[Promoted]] = {}
        for promoted in promotions:
            by_alias.setdefault(promoted.alias, []).append(promoted)
        return by_alias
