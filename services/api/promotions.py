"""What the serving room follows: every promotion with its artifact, the newest first."""

from __future__ import annotations

from pathlib import Path

from services.api.serving.promoted import Promoted
from services.shared.jobs.store import Store
from services.shared.jobs.views import PromotionView

PAGE = 100


class PromotionFeed:
    """Reads promotions; they are only ever appended, so each is read once.

    Called by one thread. Raises Unavailable while the database is away.
    """

    def __init__(self, store: Store, *, datasets_dir: Path | None = None) -> None:
        self._store = store
        self._datasets_dir = datasets_dir
        self._known: list[Promoted] = []  # newest first

    def __call__(self) -> list[Promoted]:
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
