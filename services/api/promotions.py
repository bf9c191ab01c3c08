"""What the serving room follows, and what it tells: promotions, and what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from services.api.serving.promotion import Promotion
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.gates import Int8Gate
from services.shared.jobs.views import PromotionView

PAGE = 100


class PromotionFeed:
    """Reads promotions, the newest first, and writes down what became of them.

    They are only ever appended, so each is read once. Called by one thread, and raises Unavailable
    while the database is away; what is told meanwhile, by any thread, is written when it is back.
    """

    def __init__(self, store: Store, *, datasets_dir: Path | None = None) -> None:
        self._store = store
        self._datasets_dir = datasets_dir
        self._known: list[Promotion] = []  # newest first
        self._news: deque[Callable[[], None]] = deque()  # to be written, the oldest first

    def on_served(self, promotion: Promotion, *, engine: str) -> None:
        """Record that a promotion serves, as a `RolloutListener`."""
        write = self._store.report_served
        self._news.append(partial(write, promotion.promotion_id, engine=engine))

    def on_refused(self, promotion: Promotion, reason: str, *, transient: bool) -> None:
        """Record that a promotion was refused."""
        write = self._store.report_refused
        self._news.append(partial(write, promotion.promotion_id, reason, transient=transient))

    def on_int8_gate(self, promotion: Promotion, gate: Int8Gate) -> None:
        """Record whether a model may serve in 8 bits."""
        self._news.append(partial(self._store.set_int8_gate, promotion.model_id, gate))

    def __call__(self) -> list[Promotion]:
        """Write what is to be written, and return every promotion with its artifact."""
        self._write()
        return self._read()

    def _write(self) -> None:
        while self._news:
            write = self._news.popleft()
            try:
                write()
            except Unavailable:
                self._news.appendleft(write)
                raise

    def _read(self) -> list[Promotion]:
        fresh: list[Promotion] = []
        cursor = None
        while True:
            page = self._store.promotions(cursor=cursor, limit=PAGE)
            for promotion in page.items:
                if self._known and promotion.id == self._known[0].promotion_id:
                    return self._remember(fresh)
                fresh.append(self._promoted(promotion))
            cursor = page.next_cursor
            if cursor is None:
                return self._remember(fresh)

    def _remember(self, fresh: list[Promotion]) -> list[Promotion]:
        self._known = fresh + self._known
        return list(self._known)

    def _promoted(self, promotion: PromotionView) -> Promotion:
        model = self._store.model(promotion.model_id)
        return Promotion(
            promotion_id=promotion.id,
            alias=promotion.alias,
            model_id=model.id,
            name=model.name or model.id,
            version=model.id,
            directory=model.path,
            dataset_dir=None
            if self._datasets_dir is None
            else self._datasets_dir / model.dataset_id,
        )
