"""Lets a second student answer a share of the traffic too, and counts how often it agrees. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.api.serving.active_models import ActiveStudent, Slot
from services.api.serving.batching.batcher import Batcher
from services.api.serving.errors import PredictionError
from services.api.serving.metrics import Measures
from services.api.serving.prediction import Prediction, Score
from services.api.serving.settings import ServingSettings
from services.shared.datasets.card import HeadType


class Shadow:
    """Asks the shadow student after the answer is given; nobody waits for it."""

    def __init__(
        self, slot: Slot, batcher: Batcher, settings: ServingSettings, *, measures: Measures
    ) -> None:
        self._slot = slot
        self._batcher = batcher
        self._settings = settings
        self._measures = measures
        self._due = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(
        self, texts: Sequence[str], answers: Sequence[Prediction], *, truncate: bool, alias: str
    ) -> None:
        """Let the shadow answer this request too, if it is its turn and the queue has room."""
        shadow = self._settings.shadow_alias
        student = self._slot.active(shadow)
        if alias == shadow or student is None or self._settings.shadow_share == 0:
            return
        self._due += self._settings.shadow_share
        if self._due < 1:
            return
        self._due -= 1
        if self._batcher.queue_tokens > self._settings.batch_tokens:
            return  # real requests come first
        task = asyncio.ensure_future(self._compare(list(texts), answers, student, truncate))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait for the comparisons under way."""
        await asyncio.gather(*self._tasks)

    async def _compare(
        self,
        texts: list[str],
        answers: Sequence[Prediction],
        student: ActiveStudent,
        truncate: bool,
    ) -> None:
        try:
            shadows = await self._batcher.predict(
                texts, truncate=truncate, alias=self._settings.shadow_alias
            )
        except PredictionError:
            return  # counted where it was raised; the real request has its answer
        for head in student.heads:
            for answer, shadow in zip(answers, shadows, strict=True):
                if head.name in answer.scores and head.name in shadow.scores:
                    agrees = _decision(head.type, answer.scores[head.name]) == _decision(
                        head.type, shadow.scores[head.name]
                    )
                    self._measures.shadowed.labels(head.name, str(agrees).lower()).inc()


def _decision(kind: HeadType, scores: Sequence[Score]) -> frozenset[str]:
    if kind is HeadType.MULTI_LABEL:
        return frozenset(score.label for score in scores if score.predicted)
    return frozenset({scores[0].label})
