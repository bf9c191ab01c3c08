"""The predictor: all parts of serving, assembled for `services/api/main.py`.

Torch is imported by the watcher's thread with the first promoted student, and never before: an API
without a student takes 60 MiB of memory instead of 400.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.api.serving.active_models import ActiveModel, ActiveModels
from services.api.serving.batching.batcher import Batcher
from services.api.serving.batching.shadow import Shadow
from services.api.serving.engines.malloc import limit_kernel_caches
from services.api.serving.engines.throttle import throttled
from services.api.serving.memory_headroom import check_headroom
from services.api.serving.metrics import ServingMetrics
from services.api.serving.prediction import Prediction
from services.api.serving.promotion import NullListener, Promotion, RolloutListener
from services.api.serving.quantization.background import BackgroundQuantizer
from services.api.serving.quantization.record import PACKED_KIND, read_quantization_record
from services.api.serving.rollout.load_lock import one_load_at_a_time
from services.api.serving.rollout.promotion_watcher import PromotionWatcher
from services.api.serving.settings import ServingSettings
from services.shared.datasets.text import Text

# Imports torch, so it is imported by name when the first student is loaded.
MODEL_LOADER = "services.api.serving.rollout.model_loader"


class Predictor:
    """Answers texts with the promoted students and follows their promotions."""

    def __init__(
        self,
        settings: ServingSettings | None = None,
        *,
        promotions: Callable[[], Sequence[Promotion]],
        registry: CollectorRegistry | None = None,
        listener: RolloutListener | None = None,
        load_lock: Path | None = None,
    ) -> None:
        self.settings = settings or ServingSettings()
        self.active_models = ActiveModels()
        self._load_lock = load_lock  # of all processes on this machine
        metrics = ServingMetrics(registry)
        self._listener = listener or NullListener()
        self._batcher = Batcher(self.active_models, self.settings, metrics=metrics)
        self._watcher = PromotionWatcher(
            self.active_models,
            promotions=promotions,
            load=self._load,
            poll_seconds=self.settings.poll_seconds,
            metrics=metrics,
            listener=self._listener,
            on_swapped=self.on_swapped,
        )
        self._quantizer = BackgroundQuantizer(self.settings, on_quantized=self.on_quantized)
        self._shadow = Shadow(self.active_models, self._batcher, self.settings, metrics=metrics)

    def start(self) -> None:
        """Start watching promotions."""
        # Several tokenising threads would compete with the lanes for the same cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        limit_kernel_caches()
        self._quantizer.start()
        self._watcher.start()

    async def stop(self) -> None:
        """Stop watching, and close the active models."""
        await asyncio.to_thread(self._quantizer.stop)
        await asyncio.to_thread(self._watcher.stop)
        await self._shadow.drain()
        await asyncio.to_thread(self._batcher.close)
        for alias in self.active_models.aliases():
            self.active_models.swap(alias, None)

    def active(self, alias: str = "default") -> ActiveModel | None:
        """Return the model that serves `alias` now."""
        return self.active_models.get(alias)

    def aliases(self) -> Sequence[str]:
        """Return the aliases that are served now."""
        return self.active_models.aliases()

    async def predict(
        self, texts: Sequence[Text], *, truncate: bool, alias: str = "default"
    ) -> list[Prediction]:
        """Return one prediction per text; raises what `Batcher.predict` raises."""
        predictions = await self._batcher.predict(texts, truncate=truncate, alias=alias)
        self._shadow.mirror(texts, predictions, truncate=truncate, alias=alias)
        return predictions

    def on_swapped(self, promotion: Promotion) -> None:
        """Report the int8 gate's decision on a student that now serves, or have it made."""
        self._report_gate(promotion)  # it may have been quantized by hand
        active = self.active_models.get(promotion.alias)
        # What transformers runs has no form in 8 bits.
        if active is not None and active.engine.kind.startswith(PACKED_KIND):
            self._quantizer.submit(promotion)

    def on_quantized(self, promotion: Promotion) -> None:
        """Report the int8 gate's decision, and load the student in 8 bits if it passed."""
        if self._report_gate(promotion):
            self._watcher.reload(promotion.model_id)

    def _report_gate(self, promotion: Promotion) -> bool:
        """Report the int8 gate's decision, if there is one, and return whether it passed."""
        record = read_quantization_record(promotion.directory)
        if record is None:
            return False
        self._listener.on_int8_gate(promotion, record.gate())
        return record.passed

    def _load(self, promotion: Promotion) -> ActiveModel:
        with one_load_at_a_time(self._load_lock, stopping=lambda: self._watcher.is_stopping):
            return self._load_now(promotion)

    def _load_now(self, promotion: Promotion) -> ActiveModel:
        check_headroom(promotion.directory, self.settings)
        loader = importlib.import_module(MODEL_LOADER)
        active = [self.active_models.get(alias) for alias in self.active_models.aliases()]
        with throttled(lambda: self._batcher.queue_tokens > 0):
            model: ActiveModel = loader.load_student(
                promotion, self.settings, serving=[each for each in active if each is not None]
            )
        return model
