"""Values that the store returns: frozen, never rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, computed_field

from services.shared.datasets.card import DatasetCard
from services.shared.jobs.document_schema import StoredDocument
from services.shared.jobs.documents import (
    Evaluation,
    EventDataDict,
    FailureDict,
    JobPlanDict,
    MeasuredPeaks,
    ModelHeadDict,
    ObservedSharding,
    ProgressDict,
    RecipeFields,
)
from services.shared.jobs.gates import GateResult, Int8Gate
from services.shared.jobs.outcome import Outcome
from services.shared.jobs.planning.plan_vs_measured import (
    PlannedPhases,
    RankMemory,
    compare_phases,
)
from services.shared.jobs.resolved_spec import ResolvedSpec
from services.shared.jobs.spec import DistillSpec, TeacherSpec
from services.shared.jobs.state import JobState, Phase, Reason
from services.shared.memory.forensics.diagnosis import DiagnosisDict

Kind = Literal["teacher", "distill"]
Resource = Literal["dataset", "job", "model"]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True)


ItemT = TypeVar("ItemT", bound=BaseModel)


class Page(_View, Generic[ItemT]):
    """Some items and where to go on; `next_cursor` is None on the last page."""

    items: list[ItemT]
    next_cursor: str | None = None


class DatasetView(DatasetCard):
    """A stored dataset."""

    project: str
    created_at: datetime
    created_by: str | None = None  # name of the key
    deleted_at: datetime | None = None  # hidden from lists; its files go after the grace period
    deleted_by: str | None = None


class DeletionView(_View):
    """What was deleted, and until when that can be undone."""

    resource: Resource
    id: str
    deleted_at: datetime
    deleted_by: str  # name of the key, or retention
    gone_after: datetime  # then the files are removed
    notes: list[str]  # what came from it and stays


class JobSummary(_View):
    """A line of the list of jobs."""

    id: str
    kind: Kind
    name: str | None
    state: JobState
    phase: Phase | None
    reason: Reason | None
    message: str | None
    progress: StoredDocument[ProgressDict] | None
    dataset_id: str
    parent_job_id: str | None
    retry_of: str | None
    project: str
    priority: int
    attempt: int  # number of the last attempt; 0 before the first
    created_at: datetime
    created_by: str | None  # name of the key
    started_at: datetime | None
    ended_at: datetime | None
    deleted_at: datetime | None  # hidden from lists; its run directories go after the grace period
    deleted_by: str | None


class JobChanges(_View):
    """The jobs that changed after an event, and those that run."""

    last_seq: int  # of all events that were considered; 0 where there is none
    is_complete: bool  # false where more changed than fit
    items: list[JobSummary]  # the newest first


class JobCounts(_View):
    """How many jobs of one kind are in one state."""

    kind: Kind
    state: JobState
    jobs: int


class AttemptView(_View):
    """One run of a job by one worker."""

    job_id: str
    number: int
    worker: str
    recipe: RecipeFields
    started_at: datetime
    ended_at: datetime | None
    ending: str | None  # outcome.End, or "lost"
    reason: Reason | None
    message: str | None
    exit_code: int | None
    failed_rank: int | None
    measured: MeasuredPeaks | None
    observed: StoredDocument[ObservedSharding] | None
    diagnosis: StoredDocument[DiagnosisDict] | None
    plan: StoredDocument[JobPlanDict] | None  # that it ran with
    failure: StoredDocument[FailureDict] | None  # of the rank that caused it


class JobView(JobSummary):
    """Everything that `GET /jobs/{id}` shows."""

    spec: TeacherSpec | DistillSpec
    recipe: RecipeFields  # of the next or running attempt, as decided so far
    plan: StoredDocument[JobPlanDict] | None
    metrics: Evaluation | None  # of the last evaluation
    measured: MeasuredPeaks | None
    observed: StoredDocument[ObservedSharding] | None
    diagnosis: StoredDocument[DiagnosisDict] | None
    max_attempts: int
    worker: str | None
    teacher_model_id: str | None
    model_id: str | None
    child_job_ids: list[str]
    attempts: list[AttemptView]  # every one, with the recipe and the plan that it ran with

    @computed_field  # type: ignore[prop-decorator]
    @property
    def memory(self) -> dict[str, RankMemory]:
        """Planned and measured peaks of each phase, by rank."""
        return compare_phases(PlannedPhases.of(self.plan), self.measured, self.observed)


class EventType(str, Enum):
    """The type of an event; `data` holds the details."""

    STATE = "state"  # {"state", "reason"?, "message"?}
    PHASE = "phase"  # {"phase"}
    EVALUATION = "evaluation"  # {"evaluation", "step"?, "epoch"?}

    __str__ = str.__str__


class EventView(_View):
    """Something that happened to a job; `seq` only increases."""

    seq: int
    job_id: str
    attempt: int
    type: EventType
    data: StoredDocument[EventDataDict]
    created_at: datetime


class ProcessServingView(_View):
    """Whether one process of the API serves the model of a promotion."""

    process: str  # host:pid:random
    outcome: Literal["served", "refused"]
    engine: str | None
    why: str | None
    transient: bool
    created_at: datetime


class ServingView(_View):
    """Whether the API serves the model of a promotion: the newest report of any process, and that of each."""

    outcome: Literal["served", "refused"]
    engine: str | None  # that serves it
    why: str | None  # it was refused
    transient: bool  # refused for now: it is retried
    created_at: datetime
    processes: list[ProcessServingView] = []  # that run now; those that serve another are left out


class ModelView(_View):
    """A trained model and where it came from."""

    id: str
    project: str
    job_id: str
    kind: Kind
    name: str | None
    dataset_id: str
    teacher_model_id: str | None
    heads: list[StoredDocument[ModelHeadDict]]
    parameters: int
    size_bytes: int
    manifest_sha256: str | None
    metrics: Evaluation
    gate: GateResult | None  # None for teachers: nothing to compare with
    int8_gate: Int8Gate | None  # None until the model was prepared for serving in 8 bits
    serving: dict[str, ServingView]  # by alias: of the model's newest promotion to it
    path: Path  # directory of the artifact
    created_at: datetime
    deleted_at: datetime | None  # hidden from lists; its files go after the grace period
    deleted_by: str | None


class PromotionView(_View):
    """From `created_at` on, `alias` serves `model_id`, unless `serving` says that it was refused."""

    id: str
    seq: int
    project: str  # in which the alias is
    promoted_by: str | None  # the name of a key: of the job's, where the job promoted its own model
    alias: str
    model_id: str
    forced: bool
    reason: str | None
    serving: ServingView | None = None  # newest record; None until an API has loaded the model
    created_at: datetime


class AuditView(_View):
    """One write: who, what, from where, and what became of it."""

    seq: int
    created_at: datetime
    key_name: str  # `local` on a server without keys, `server` for what it did itself
    key_id: str | None  # the beginning of the key's hash
    project: str  # of the key
    action: str  # the operation's id in the OpenAPI document
    target: str | None  # what was changed
    created: str | None  # what was created
    address: str | None
    request_id: str | None  # X-Request-ID of the response
    outcome: Literal["done", "refused", "failed"]
    status: int | None  # of HTTP
    detail: str | None


class MaintenanceView(_View):
    """Why writes are refused, and since when."""

    reason: str
    started_by: str  # name of the key
    started_at: datetime


class PlanError(NamedTuple):
    """By how much the worst rank of a finished job exceeded its plan, as a share of the plan."""

    device: str
    phase: str
    ratio: float


class QueuedJob(NamedTuple):
    """A job to be sent to the queue of its kind, after the commit."""

    job_id: str
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A worker's right to run one attempt while it holds the lease."""

    job_id: str
    attempt: int
    token: str
    spec: TeacherSpec | DistillSpec
    recipe: RecipeFields  # `auto` resolved, changes of retries applied
    plan: JobPlanDict | None
    model_id: str  # of the model that this attempt makes if it succeeds
    resolved: ResolvedSpec | None  # None only with a `problem`
    resume_dir: Path | None  # checkpoints of an earlier attempt
    problem: Outcome | None  # why it cannot run, found while resolving paths: finish with it


class HeartbeatReply(str, Enum):
    """What a worker is to do after a heartbeat."""

    CONTINUE = "continue"
    CANCEL = "cancel"
    LOST = "lost"  # another worker may have the job: stop the ranks, discard the result

    __str__ = str.__str__


@dataclass(frozen=True)
class FinishResult:
    """Whether an outcome was applied, and which jobs are to be sent now."""

    applied: bool
    to_send: list[QueuedJob]
