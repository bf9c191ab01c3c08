"""How an attempt ended: made by `launch.aftermath.outcome`, applied by `jobs.db.store`."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict

from services.shared.jobs.document_schema import StoredDocument
from services.shared.jobs.documents import (
    FailureDict,
    JobPlanDict,
    MeasuredPeaks,
    ObservedSharding,
    RecipeFields,
)
from services.shared.jobs.run_directory import Report
from services.shared.jobs.state import Reason
from services.shared.memory.forensics.diagnosis import DiagnosisDict


class End(str, Enum):
    """How an attempt ended, and thereby what follows for its job."""

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
    diagnosis: StoredDocument[DiagnosisDict] | None = None  # after a memory failure
    measured: MeasuredPeaks = {}
    observed: StoredDocument[ObservedSharding] = {}
    failure: StoredDocument[FailureDict] | None = None  # of the rank that caused it
    recipe_changes: RecipeFields = {}  # with RETRY
    plan: StoredDocument[JobPlanDict] | None = None  # with RETRY: of the changed recipe
