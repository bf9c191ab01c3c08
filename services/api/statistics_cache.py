"""Keeps the statistics of datasets, which do not change; computes one at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict

from services.api.settings import ApiSettings
from services.shared.datasets.card import DatasetCard
from services.shared.datasets.statistics import DatasetStatistics, dataset_statistics

_KEPT = 32


class StatisticsCache:
    """The statistics of the datasets that were asked for last. Called from threads."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._known: OrderedDict[str, DatasetStatistics] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, card: DatasetCard) -> DatasetStatistics:
        """Return the statistics of a dataset. Raises FileNotFoundError where its files are gone."""
        with self._lock:
            found = self._known.get(card.id)
            if found is None:
                directory = self._settings.dataset_dir(card.id)
                if not directory.is_dir():
                    raise FileNotFoundError(directory)
                found = dataset_statistics(directory, card)
                self._known[card.id] = found
            self._known.move_to_end(card.id)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return found
