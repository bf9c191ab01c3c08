"""How an attempt ended: the value that `launch.verdict` makes and `jobs.store` applies."""

from __future__ import annotations

from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict

from services.shared.jobs.run_directory import Report
from services.shared.jobs.state import Reason


class End(str, Enum):
    """What becomes of the job after this attempt."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    HANDED_BACK = "handed_back"  # a worker that shuts down: queue it again, no attempt is used up
    RETRY = "retry"  # this attempt failed, the job gets another

    __str__ = str.__str__


class Outcome(BaseModel):
    """The end of one attempt."""

    model_config = ConfigDict(frozen=True)

    end: End
    reason: Reason | None = None  # none for succeeded and handed_back
    message: str = ""  # one sentence a person can act on
    exit_code: int | None = None
    failed_rank: int | None = None
    report: Report | None = None
    diagnosis: dict[str, Any] | None = None  # memory.forensics, after a memory failure
    measured: dict[str, dict[str, int]] = {}  # rank -> phase -> peak allocated bytes
    observed: dict[str, dict[str, Any]] = {}  # rank -> what the probe saw after wrapping
    failure: dict[str, Any] | None = None  # Failure of the rank that caused it
    recipe_changes: dict[str, Any] = {}  # with RETRY: fields of spec.Recipe to change
    plan: dict[str, Any] | None = None  # with RETRY: of the changed recipe
