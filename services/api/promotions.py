"""Feeds promotions from the database to the serving package and stores their outcomes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from services.api.serving.promotion import Promotion
from services.shared.jobs.db.processes import BEAT_SECONDS, ServingProcess, process_name
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.gates import Int8Gate
from services.shared.jobs.projects import qualified_alias
from services.shared.jobs.views import PromotionView

PAGE = 100


class PromotionFeed:
    """Reads promotions, newest first, and stores their outcomes.

    Promotions are append-only, so the artifact of each is looked up once. Called from one thread; raises
    Unavailable while the database is unreachable. Outcomes may be reported from any thread meanwhile and
    are stored once it is back.
    """

    def __init__(
        self,
        store: Store,
        *,
        datasets_dir: Path | None = None,
        process: ServingProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._process = process or ServingProcess(store.engine, process_name())
        self._clock = clock
        self._beat_at = clock()
        self._datasets_dir = datasets_dir
        self._known: dict[str, tuple[int, Promotion]] = {}  # by id, with its sequence number
        self._has_all = False  # the whole history has been read once
        self._pending_writes: deque[Callable[[], None]] = deque()  # oldest first

    def on_served(self, promotion: Promotion, *, engine: str) -> None:
        """Record that a promotion serves, as a `RolloutListener`."""
        id = promotion.promotion_id
        self._pending_writes.append(partial(self._store.report_served, id, engine=engine))
        self._pending_writes.append(partial(self._process.report, id, engine=engine))

    def on_refused(self, promotion: Promotion, reason: str, *, transient: bool) -> None:
        """Record that a promotion was refused."""
        id = promotion.promotion_id
        self._pending_writes.append(
            partial(self._store.report_refused, id, reason, transient=transient)
        )
        self._pending_writes.append(
            partial(self._process.report, id, refused=reason, transient=transient)
        )

    def on_int8_gate(self, promotion: Promotion, gate: Int8Gate) -> None:
        """Record whether a model may serve in 8 bits."""
        self._pending_writes.append(partial(self._store.set_int8_gate, promotion.model_id, gate))

    def __call__(self) -> list[Promotion]:
        """Store pending outcomes, then return every promotion with its artifact."""
        self._flush()
        if self._clock() >= self._beat_at:
            self._process.beat()
            self._beat_at = self._clock() + BEAT_SECONDS
        return self._read()

    def close(self) -> None:
        """Report that this process ends, unless the database is away."""
        with suppress(Unavailable):
            self._process.leave()

    def _flush(self) -> None:
        while self._pending_writes:
            write = self._pending_writes.popleft()
            try:
                write()
            except Unavailable:
                self._pending_writes.appendleft(write)
                raise

    def _read(self) -> list[Promotion]:
        # Numbers are assigned before the commit, so an older promotion may appear after a newer one:
        # the newest page is read whole each time, and the next ones while they hold unknown promotions.
        cursor = None
        while True:
            page = self._store.promotions(cursor=cursor, limit=PAGE)
            new = [promotion for promotion in page.items if promotion.id not in self._known]
            for promotion in new:
                self._known[promotion.id] = (promotion.seq, self._with_artifact(promotion))
            cursor = page.next_cursor
            if cursor is None or (self._has_all and not new):
                break
        self._has_all = True
        newest_first = sorted(self._known.values(), key=lambda each: each[0], reverse=True)
        return [promotion for _, promotion in newest_first]

    def _with_artifact(self, promotion: PromotionView) -> Promotion:
        model = self._store.model(promotion.model_id)
        return Promotion(
            promotion_id=promotion.id,
            alias=qualified_alias(promotion.project, promotion.alias),
            model_id=model.id,
            name=model.name or model.id,
            version=model.id,
            directory=model.path,
            dataset_dir=None
            if self._datasets_dir is None
            else self._datasets_dir / model.dataset_id,
        )
