"""Shadow traffic: a second model answers a share of the requests, and agreement is counted. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.api.serving.active_models import ActiveModel, ActiveModels
from services.api.serving.batching.batcher import Batcher
from services.api.serving.errors import PredictionError
from services.api.serving.metrics import ServingMetrics
from services.api.serving.prediction import Prediction, Score
from services.api.serving.settings import ServingSettings
from services.shared.datasets.card import HeadType
from services.shared.datasets.text import Text


class Shadow:
    """Sends requests to the shadow model after they were answered, without delaying the answer."""

    def __init__(
        self,
        active_models: ActiveModels,
        batcher: Batcher,
        settings: ServingSettings,
        *,
        metrics: ServingMetrics,
    ) -> None:
        self._active_models = active_models
        self._batcher = batcher
        self._settings = settings
        self._metrics = metrics
        self._credit = 0.0  # a request is mirrored whenever this reaches 1
        self._tasks: set[asyncio.Task[None]] = set()

    def mirror(
        self, texts: Sequence[Text], answers: Sequence[Prediction], *, truncate: bool, alias: str
    ) -> None:
        """Send a request to the shadow model if it falls into the share and the queue is short."""
        project, slash, _ = alias.rpartition("/")
        shadow_alias = f"{project}{slash}{self._settings.shadow_alias}"  # of the same project
        shadow = self._active_models.get(shadow_alias)
        if alias == shadow_alias or shadow is None or self._settings.shadow_share == 0:
            return
        self._credit += self._settings.shadow_share
        if self._credit < 1:
            return
        self._credit -= 1
        if self._batcher.queue_tokens > self._settings.batch_tokens:
            return  # client requests have priority
        task = asyncio.ensure_future(
            self._compare(list(texts), answers, shadow, truncate=truncate, alias=shadow_alias)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Wait for the comparisons in progress."""
        await asyncio.gather(*self._tasks)

    async def _compare(
        self,
        texts: list[Text],
        answers: Sequence[Prediction],
        shadow: ActiveModel,
        *,
        truncate: bool,
        alias: str,
    ) -> None:
        try:
            shadow_answers = await self._batcher.predict(texts, truncate=truncate, alias=alias)
        except PredictionError:
            return  # counted where it was raised; the client has its answer
        for head in shadow.heads:
            for answer, other in zip(answers, shadow_answers, strict=True):
                if head.name in answer.scores and head.name in other.scores:
                    agrees = _decision(head.type, answer.scores[head.name]) == _decision(
                        head.type, other.scores[head.name]
                    )
                    self._metrics.shadow_answers.labels(head.name, str(agrees).lower()).inc()


def _decision(kind: HeadType, scores: Sequence[Score]) -> frozenset[str]:
    if kind is HeadType.MULTI_LABEL:
        return frozenset(score.label for score in scores if score.predicted)
    return frozenset({scores[0].label})
