"""The serving room as one part: what `services/api/main.py` starts, stops and asks.

Torch is loaded by the follower's thread, with the first promoted student, and never before: an API
without a student costs 60 MiB instead of 400.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from services.api.serving.active_models import ActiveStudent, Slot
from services.api.serving.batching.batcher import Batcher
from services.api.serving.batching.shadow import Shadow
from services.api.serving.engines.malloc import bound_caches
from services.api.serving.engines.throttle import aside
from services.api.serving.memory_headroom import check_memory
from services.api.serving.metrics import Measures
from services.api.serving.prediction import Prediction
from services.api.serving.promotion import NoReports, Promoted, Reports
from services.api.serving.quantization.background import Preparer
from services.api.serving.quantization.record import gate_of, read_prepared
from services.api.serving.rollout.promotion_watcher import Follower
from services.api.serving.settings import ServingSettings

# The one door to torch. Named here and not imported, so that it opens when a student is promoted.
ENGINES = "services.api.serving.rollout.model_loader"


class Predictor:
    """Slot, batcher, follower, preparer and shadow, joined."""

    def __init__(
        self,
        settings: ServingSettings | None = None,
        *,
        promotions: Callable[[], Sequence[Promoted]],
        registry: CollectorRegistry | None = None,
        reports: Reports | None = None,
    ) -> None:
        self.settings = settings or ServingSettings()
        self.slot = Slot()
        self._measures = Measures(registry)
        self._reports = reports or NoReports()
        self.batcher = Batcher(self.slot, self.settings, measures=self._measures)
        self._follower = Follower(
            self.slot,
            promotions=promotions,
            load=self._load,
            poll_seconds=self.settings.poll_seconds,
            measures=self._measures,
            reports=self._reports,
            on_swapped=self._swapped,
        )
        self._preparer = Preparer(self.settings, on_prepared=self._prepared)
        self._shadow = Shadow(self.slot, self.batcher, self.settings, measures=self._measures)

    def start(self) -> None:
        """Begin to follow the promotions."""
        # Several tokenising threads would compete with the lanes for the same cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        bound_caches()
        self._preparer.start()
        self._follower.start()

    async def stop(self) -> None:
        """Stop following, and let go of the students."""
        await asyncio.to_thread(self._preparer.stop)
        await asyncio.to_thread(self._follower.stop)
        await self._shadow.settle()
        await asyncio.to_thread(self.batcher.close)
        for alias in self.slot.aliases():
            self.slot.swap(alias, None)

    def active(self, alias: str = "default") -> ActiveStudent | None:
        """Return the student that serves `alias` now."""
        return self.slot.active(alias)

    def aliases(self) -> Sequence[str]:
        """Return the aliases that are served now."""
        return self.slot.aliases()

    async def predict(
        self, texts: Sequence[str], *, truncate: bool, alias: str = "default"
    ) -> list[Prediction]:
        """Return one prediction a text; see `Batcher.predict` for what it raises."""
        predictions = await self.batcher.predict(texts, truncate=truncate, alias=alias)
        self._shadow.follow(texts, predictions, truncate=truncate, alias=alias)
        return predictions

    def _swapped(self, promoted: Promoted) -> None:
        self._report_gate(promoted)  # it may have been prepared by hand
        self._preparer.consider(promoted)

    def _prepared(self, promoted: Promoted) -> None:
        if self._report_gate(promoted):
            self._follower.reload(promoted.model_id)

    def _report_gate(self, promoted: Promoted) -> bool:
        """Tell what the gate says of 8 bits, and return whether it lets them serve."""
        prepared = read_prepared(promoted.directory)
        if prepared is None:
            return False
        self._reports.prepared(promoted, gate_of(prepared))
        return prepared.passed

    def _load(self, promoted: Promoted) -> ActiveStudent:
        check_memory(promoted.directory, self.settings)
        loading = importlib.import_module(ENGINES)
        active = [self.slot.active(alias) for alias in self.slot.aliases()]
        with aside(lambda: self.batcher.queue_tokens > 0):
            student: ActiveStudent = loading.load_student(
                promoted, self.settings, serving=[each for each in active if each is not None]
            )
        return student
