"""What the serving room follows, and what it tells: promotions, and what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from services.api.serving.promotion import Promoted
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
        self._known: list[Promoted] = []  # newest first
        self._news: deque[Callable[[], None]] = deque()  # to be written, the oldest first

    def served(self, promoted: Promoted, *, engine: str) -> None:
        """Remember that a promotion serves; as `Reports` has it."""
        write = self._store.report_served
        self._news.append(partial(write, promoted.promotion_id, engine=engine))

    def refused(self, promoted: Promoted, why: str, *, transient: bool) -> None:
        """Remember that a promotion was refused."""
        write = self._store.report_refused
        self._news.append(partial(write, promoted.promotion_id, why, transient=transient))

    def prepared(self, promoted: Promoted, gate: Int8Gate) -> None:
        """Remember whether a model may serve in 8 bits."""
        self._news.append(partial(self._store.set_int8_gate, promoted.model_id, gate))

    def __call__(self) -> list[Promoted]:
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

    def _read(self) -> list[Promoted]:
        fresh: list[Promoted] = []
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

    def _remember(self, fresh: list[Promoted]) -> list[Promoted]:
        self._known = fresh + self._known
        return list(self._known)

    def _promoted(self, promotion: PromotionView) -> Promoted:
        model = self._store.model(promotion.model_id)
        return Promoted(
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
