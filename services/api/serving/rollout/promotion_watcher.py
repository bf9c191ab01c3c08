"""Polls for promotions, loads the new student in a background thread, and swaps it in. Torch-free.

Promotions are ordered newest first, and the newest one that loads serves: if the latest is refused and
nothing serves yet, as after a restart, the one before it serves.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import structlog

from services.api.serving.active_models import ActiveModel, ActiveModels
from services.api.serving.metrics import ServingMetrics
from services.api.serving.promotion import (
    NullListener,
    Promotion,
    RolloutListener,
    StudentRefused,
)
from services.api.serving.rollout.load_lock import LoadAbandoned
from services.shared.jobs.db.model_queries import DEFAULT_ALIAS
from services.shared.jobs.errors import Unavailable

log = structlog.get_logger(__name__)

# A transient refusal (for lack of memory) is retried after this time.
RETRY_SECONDS = 30.0


class PromotionWatcher:
    """Keeps the active models in line with the promotions."""

    def __init__(
        self,
        active_models: ActiveModels,
        *,
        promotions: Callable[[], Sequence[Promotion]],
        load: Callable[[Promotion], ActiveModel],
        poll_seconds: float,
        metrics: ServingMetrics | None = None,
        listener: RolloutListener | None = None,
        on_swapped: Callable[[Promotion], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._active_models = active_models
        self._promotions = promotions
        self._load = load
        self._poll_seconds = poll_seconds
        self._metrics = metrics or ServingMetrics()
        self._listener = listener or NullListener()
        self._on_swapped = on_swapped
        self._clock = clock
        self._serving: dict[str, Promotion] = {}  # by alias
        self._retry_at: dict[str, float] = {}  # refused promotion's id -> when to try it again
        self._reloads: SimpleQueue[str] = SimpleQueue()  # model ids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="promotion-watcher", daemon=True)

    def start(self) -> None:
        """Start the polling thread."""
        self._thread.start()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self, *, timeout_seconds: float = 10.0) -> None:
        """Stop polling, waiting up to the timeout for a load in progress."""
        self._stop.set()
        self._thread.join(timeout_seconds)

    def reload(self, model_id: str) -> None:
        """Load a serving model again at the next poll, because a better engine is available for it."""
        self._reloads.put(model_id)

    def poll(self) -> bool:
        """Act on the current promotions; return whether an active model changed.

        The default alias comes first, then the newest promotions. Where loading takes long, as of hundreds
        of aliases after a restart, it returns after the first, so that newer promotions are seen.
        """
        read_at = self._clock()
        by_alias = _by_alias(self._promotions())
        changed = False
        while not self._reloads.empty():
            changed |= self._reload(self._reloads.get())
        withdrawn = [alias for alias in self._serving if alias not in by_alias]
        for alias in sorted([*by_alias, *withdrawn], key=lambda each: each != DEFAULT_ALIAS):
            changed |= self._update_alias(alias, by_alias.get(alias, []))
            if changed and self._clock() - read_at > self._poll_seconds:
                return True
        return changed

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                changed = self.poll()
            except Unavailable as error:
                # The database recovers by itself; active models keep serving.
                log.warning("promotions_unavailable", reason=str(error))
                changed = False
            except Exception:
                log.exception("promotion_poll_failed")
                changed = False
            # Something newer may have been promoted during a load: then poll again at once.
            if not changed:
                self._stop.wait(self._poll_seconds)

    def _update_alias(self, alias: str, candidates: Sequence[Promotion]) -> bool:
        current = self._serving.get(alias)
        if not candidates:
            if current is not None:
                self._active_models.swap(alias, None)
                del self._serving[alias]
            return current is not None
        for wanted in candidates:
            if current is not None and wanted.promotion_id == current.promotion_id:
                return False
            if self._clock() < self._retry_at.get(wanted.promotion_id, 0.0):
                continue
            model = self._model_for(wanted)
            if model is None:
                continue
            if self._stop.is_set():
                model.retire()
                return False
            self._activate(wanted, model)
            return True
        return False

    def _activate(self, promotion: Promotion, model: ActiveModel) -> None:
        self._active_models.swap(promotion.alias, model)
        self._serving[promotion.alias] = promotion
        self._metrics.swaps.labels("swapped").inc()
        log.info("student_swapped_in", alias=promotion.alias, model_id=promotion.model_id)
        self._listener.on_served(promotion, engine=model.engine.kind)
        self._on_swapped(promotion)

    def _model_for(self, wanted: Promotion) -> ActiveModel | None:
        """Return the promoted model, loaded unless another alias serves it; None if it is refused."""
        for alias, serving in self._serving.items():
            active = self._active_models.get(alias)
            if serving.model_id == wanted.model_id and active is not None:
                return active
        try:
            return self._load_or_refuse(wanted)
        except LoadAbandoned:
            return None
        except StudentRefused as refusal:
            retry_at = self._clock() + RETRY_SECONDS if refusal.transient else float("inf")
            self._retry_at[wanted.promotion_id] = retry_at
            self._listener.on_refused(wanted, str(refusal), transient=refusal.transient)
            return None

    def _reload(self, model_id: str) -> bool:
        """Load a model again and swap it in on every alias it serves; keep the current one if refused."""
        aliases = [alias for alias, each in self._serving.items() if each.model_id == model_id]
        if not aliases:
            return False
        try:
            model = self._load_or_refuse(self._serving[aliases[0]])
        except (StudentRefused, LoadAbandoned):
            return False  # logged; the current model keeps serving
        for alias in aliases:
            self._active_models.swap(alias, model)
            self._listener.on_served(self._serving[alias], engine=model.engine.kind)
        self._metrics.swaps.labels("reloaded").inc()
        return True

    def _load_or_refuse(self, wanted: Promotion) -> ActiveModel:
        """Load a model. Raises StudentRefused, which is logged and counted, and LoadAbandoned."""
        log.info("student_loading", alias=wanted.alias, model_id=wanted.model_id)
        try:
            return self._load(wanted)
        except StudentRefused as error:
            refusal = error
        except LoadAbandoned:
            raise
        except Exception as error:  # noqa: BLE001
            # A boundary: whatever is wrong with an artifact, the current model keeps serving.
            reason = f"{type(error).__name__}: {error}"
            refusal = StudentRefused(reason, transient=_may_pass(error))
        log.error(
            "student_refused", alias=wanted.alias, model_id=wanted.model_id, reason=str(refusal)
        )
        self._metrics.swaps.labels("refused").inc()
        raise refusal


# What the machine lacks for now; none says anything about the artifact.
_PASSING_ERRNOS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EIO}
    | {errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT}
)
_PASSING_TEXTS = tuple(
    text
    for number in sorted(_PASSING_ERRNOS)
    for text in (f"(os error {number})", os.strerror(number))
)


def _may_pass(error: Exception) -> bool:
    """Return whether a failure to load is worth a retry, by the error or by one that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return True
        if isinstance(cause, OSError) and cause.errno in _PASSING_ERRNOS:
            return True
        # Libraries in Rust and C++ report the system's error as text, in exceptions of their own.
        if any(text in str(cause) for text in _PASSING_TEXTS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _by_alias(promotions: Sequence[Promotion]) -> dict[str, list[Promotion]]:
    by_alias: dict[str, list[Promotion]] = {}
    for promotion in promotions:
        by_alias.setdefault(promotion.alias, []).append(promotion)
    return by_alias
