"""How long what jobs leave behind is kept: by default, by kind of job, and by the tags of its spec.

A tag overrides the kind, which overrides the default. Of several tags the longest period counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Days = Annotated[float, Field(ge=0)]
Period = Literal[
    "checkpoints_days",
    "logs_days",
    "metrics_days",
    "events_days",
    "failed_runs_days",
    "finished_runs_days",
    "unpromoted_models_days",
    "superseded_models_days",
]


class RetentionPeriods(BaseModel):
    """Days after the end of a job; null keeps it for ever."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoints_days: Days | None = 30  # of jobs that failed or were cancelled
    logs_days: Days | None = 180
    metrics_days: Days | None = 180  # the series of progress and memory
    events_days: Days | None = 180
    failed_runs_days: Days | None = (
        365  # jobs that failed or were cancelled, with their run directories
    )
    finished_runs_days: Days | None = 365  # jobs that succeeded and whose model is deleted
    unpromoted_models_days: Days | None = None  # never promoted, and without students
    superseded_models_days: Days | None = None  # promoted once, and served by no alias any more


class Retention(RetentionPeriods):
    """The default periods, and what overrides them."""

    signals_days: Days | None = 30  # since cached teacher outputs were last read
    kinds: dict[Literal["teacher", "distill"], RetentionPeriods] = {}
    tags: dict[str, RetentionPeriods] = {}

    def days(self, period: Period, *, kind: str, tags: Sequence[str]) -> float | None:
        """Return the period of a job; None for ever."""
        tagged = [self.tags[tag] for tag in tags if tag in self.tags]
        of_kind = [periods for name, periods in self.kinds.items() if name == kind]
        for level in (tagged, of_kind):
            given = [getattr(each, period) for each in level if period in each.model_fields_set]
            if given:
                return None if None in given else max(given)
        value: float | None = getattr(self, period)
        return value

    def shortest(self, period: Period) -> float | None:
        """Return the shortest period of any job, None if everything is kept for ever."""
        levels = [self, *self.kinds.values(), *self.tags.values()]
        given = [getattr(e, period) for e in levels if e is self or period in e.model_fields_set]
        return min((days for days in given if days is not None), default=None)
