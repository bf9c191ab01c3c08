"""The tables. CHECK constraints refuse what must never be stored.

datasets    one row per validated upload
jobs        one row per request; state, lease and the last known progress
attempts    one row per claim of a job by a worker
events      what happened to a job, in order; read by the event stream
models      one row per successful job
promotions  appended only: which model an alias serves from then on
servings    appended only: whether the API loaded the model of a promotion
api_processes, process_servings  which processes of the API run, and what each serves
audit       appended only: who wrote what
queue_turns when each project last had a turn in the queue
maintenance its row is there while writes are refused
epochs      one row: what ties this database to the files of its data directory
usage_samples  how full the disk was, and by which kinds of files

Datasets, jobs and models are deleted in two steps: `deleted_at` hides a row and can be undone; once its
files are gone it has `purged_at`, and stays only as long as another row refers to it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    MetaData,
    func,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from services.shared.jobs.db.column_types import CleanJson, CleanText
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
from services.shared.jobs.projects import DEFAULT_PROJECT
from services.shared.jobs.views import Kind
from services.shared.memory.forensics.diagnosis import DiagnosisDict


class Table(DeclarativeBase):
    """What all tables share: column types and names of constraints."""

    metadata = MetaData(
        naming_convention={
            "pk": "%(table_name)s_pkey",
            "fk": "%(table_name)s_%(column_0_name)s_fkey",
            "uq": "%(table_name)s_%(column_0_name)s_key",
            "ck": "%(table_name)s_%(constraint_name)s",
            "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        }
    )
    type_annotation_map = {
        str: CleanText,
        datetime: DateTime(timezone=True),
    }


class OwnedByProject:
    """A column that sessions of one project filter by (`connection.transaction`)."""

    project: Mapped[str] = mapped_column(server_default=DEFAULT_PROJECT)


# Conditions of partial indexes. Queries use the same text: with a bound parameter in place of the
# state, Postgres cannot tell that a prepared statement may use the index.
IS_QUEUED = text("state = 'queued'")
IS_LEASED = text("state IN ('running', 'cancelling')")


class Deletable:
    """The columns of what is deleted in two steps."""

    id: Mapped[str] = mapped_column(primary_key=True)
    deleted_at: Mapped[datetime | None]
    deleted_by: Mapped[str | None]  # name of the key, or retention
    purged_at: Mapped[datetime | None]  # its files are gone


def _deletable() -> tuple[CheckConstraint, CheckConstraint]:
    return (
        CheckConstraint("(deleted_at IS NULL) = (deleted_by IS NULL)", name="deleted_by_someone"),
        CheckConstraint(
            "purged_at IS NULL OR deleted_at IS NOT NULL", name="purged_after_deletion"
        ),
    )


def _index_where_set(table: str, column: str) -> Index:
    is_set = sqlalchemy.column(column).is_not(None)
    return Index(f"{table}_{column}_idx", column, postgresql_where=is_set)


class DatasetRow(Deletable, OwnedByProject, Table):
    """A validated dataset; its files are below the datasets directory, under its id."""

    __tablename__ = "datasets"

    card: Mapped[dict[str, object]] = mapped_column(CleanJson)  # datasets.card.DatasetCard
    size_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    created_by: Mapped[str | None]  # name of the key
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        *_deletable(),
        _index_where_set("datasets", "deleted_at"),
        Index("datasets_project_id_idx", "project", "id"),
    )


class JobRow(Deletable, OwnedByProject, Table):
    """A job. Only `transitions.transition` writes `state`."""

    __tablename__ = "jobs"

    kind: Mapped[Kind] = mapped_column(CleanText)
    name: Mapped[str | None]
    state: Mapped[str]
    phase: Mapped[str | None]
    reason: Mapped[str | None]
    message: Mapped[str | None]

    spec: Mapped[dict[str, object]] = mapped_column(
        CleanJson
    )  # spec.TeacherSpec | spec.DistillSpec
    recipe: Mapped[RecipeFields] = mapped_column(CleanJson)  # of the next attempt, `auto` resolved
    plan: Mapped[JobPlanDict | None] = mapped_column(CleanJson)
    progress: Mapped[ProgressDict | None] = mapped_column(CleanJson)
    metrics: Mapped[Evaluation | None] = mapped_column(CleanJson)
    measured: Mapped[MeasuredPeaks | None] = mapped_column(CleanJson)
    observed: Mapped[ObservedSharding | None] = mapped_column(CleanJson)
    diagnosis: Mapped[DiagnosisDict | None] = mapped_column(CleanJson)

    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id"))
    parent_job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    teacher_model_id: Mapped[str | None] = mapped_column(ForeignKey("models.id", use_alter=True))
    retry_of: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))

    attempt: Mapped[int] = mapped_column(server_default="0")  # number of the last one
    used_attempts: Mapped[int] = mapped_column(server_default="0")  # less those handed back
    max_attempts: Mapped[int]
    priority: Mapped[int] = mapped_column(server_default="0")
    worker: Mapped[str | None]
    token: Mapped[str | None]
    lease_until: Mapped[datetime | None]

    idempotency_key: Mapped[str | None] = mapped_column(
        unique=True
    )  # after its project, `default` apart
    spec_sha256: Mapped[str]
    created_by: Mapped[str | None]  # name of the key
    running_quota: Mapped[int | None]  # how many jobs of that key may run at once
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    sent_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("kind IN ('teacher', 'distill')", name="kind_known"),
        CheckConstraint(
            "state IN ('waiting', 'queued', 'running', 'cancelling', "
            "'succeeded', 'failed', 'cancelled')",
            name="state_known",
        ),
        CheckConstraint(
            "(state IN ('succeeded', 'failed', 'cancelled')) = (ended_at IS NOT NULL)",
            name="ended_when_terminal",
        ),
        CheckConstraint(
            "(state IN ('failed', 'cancelled')) = (reason IS NOT NULL)",
            name="reason_when_not_succeeded",
        ),
        CheckConstraint(
            "(state IN ('running', 'cancelling')) = (token IS NOT NULL) "
            "AND (token IS NULL) = (lease_until IS NULL) AND (token IS NULL) = (worker IS NULL)",
            name="leased_while_running",
        ),
        CheckConstraint(
            "state <> 'waiting' OR (parent_job_id IS NOT NULL AND teacher_model_id IS NULL)",
            name="waits_for_a_parent",
        ),
        CheckConstraint(
            "state NOT IN ('running', 'cancelling', 'succeeded') "
            "OR (attempt >= 1 AND started_at IS NOT NULL)",
            name="started_when_running",
        ),
        CheckConstraint(
            "0 <= used_attempts AND used_attempts <= attempt AND max_attempts >= 1 "
            "AND used_attempts <= max_attempts",
            name="attempts_in_bounds",
        ),
        CheckConstraint("parent_job_id <> id AND retry_of <> id", name="not_its_own_relative"),
        *_deletable(),
        _index_where_set("jobs", "deleted_at"),
        _index_where_set("jobs", "ended_at"),
        _index_where_set("jobs", "retry_of"),
        _index_where_set("jobs", "teacher_model_id"),
        Index("jobs_dataset_id_idx", "dataset_id"),
        Index("jobs_state_id_idx", "state", "id"),
        Index("jobs_kind_state_id_idx", "kind", "state", "id"),
        Index("jobs_kind_id_idx", "kind", "id"),
        Index("jobs_project_id_idx", "project", "id"),
        Index("jobs_project_state_id_idx", "project", "state", "id"),
        Index(
            "jobs_parent_job_id_idx",
            "parent_job_id",
            postgresql_where=text("parent_job_id IS NOT NULL"),
        ),
        Index(
            "jobs_queued_idx",
            "kind",
            "sent_at",
            "id",
            postgresql_where=IS_QUEUED,
        ),
        Index(
            "jobs_turn_idx",
            "kind",
            "priority",
            "project",
            "id",
            postgresql_where=IS_QUEUED,
        ),
        Index(
            "jobs_leased_idx",
            "lease_until",
            postgresql_where=IS_LEASED,
        ),
    )


class AttemptRow(Table):
    """One run of a job by one worker."""

    __tablename__ = "attempts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    worker: Mapped[str]
    recipe: Mapped[RecipeFields] = mapped_column(CleanJson)
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
    ending: Mapped[str | None]  # outcome.End, or "lost"
    reason: Mapped[str | None]
    message: Mapped[str | None]
    exit_code: Mapped[int | None]
    failed_rank: Mapped[int | None]
    measured: Mapped[MeasuredPeaks | None] = mapped_column(CleanJson)
    observed: Mapped[ObservedSharding | None] = mapped_column(CleanJson)
    diagnosis: Mapped[DiagnosisDict | None] = mapped_column(CleanJson)
    plan: Mapped[JobPlanDict | None] = mapped_column(CleanJson)
    failure: Mapped[FailureDict | None] = mapped_column(CleanJson)  # of the rank that caused it

    __table_args__ = (
        CheckConstraint("number >= 1", name="number_positive"),
        CheckConstraint("(ended_at IS NULL) = (ending IS NULL)", name="ending_when_ended"),
    )


class EventRow(Table):
    """Something that happened to a job.

    The writer holds the lock of the job's row, so a job's events commit in order of `seq`.
    """

    __tablename__ = "events"

    seq: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    attempt: Mapped[int]
    type: Mapped[str]  # views.EventType
    data: Mapped[EventDataDict] = mapped_column(CleanJson)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("type IN ('state', 'phase', 'evaluation')", name="type_known"),
        Index("events_job_id_seq_idx", "job_id", "seq"),
    )


class ModelRow(Deletable, OwnedByProject, Table):
    """The result of a successful job; its files are below the models directory, under its id."""

    __tablename__ = "models"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), unique=True)
    kind: Mapped[Kind] = mapped_column(CleanText)
    name: Mapped[str | None]
    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id"))
    teacher_model_id: Mapped[str | None] = mapped_column(ForeignKey("models.id"))
    heads: Mapped[list[ModelHeadDict]] = mapped_column(CleanJson)
    parameters: Mapped[int] = mapped_column(BigInteger)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    manifest_sha256: Mapped[str | None]
    metrics: Mapped[Evaluation] = mapped_column(CleanJson)
    gate: Mapped[dict[str, object] | None] = mapped_column(CleanJson)  # gates.GateResult
    int8_gate: Mapped[dict[str, object] | None] = mapped_column(CleanJson)  # gates.Int8Gate
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("kind IN ('teacher', 'distill')", name="kind_known"),
        CheckConstraint("parameters >= 0 AND size_bytes >= 0", name="counts_not_negative"),
        Index("models_project_id_idx", "project", "id"),
        *_deletable(),
        _index_where_set("models", "deleted_at"),
        _index_where_set("models", "teacher_model_id"),
        Index("models_dataset_id_idx", "dataset_id"),
    )


class PromotionRow(OwnedByProject, Table):
    """From here on the alias serves this model; a trigger refuses UPDATE and DELETE."""

    __tablename__ = "promotions"

    seq: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    alias: Mapped[str]
    model_id: Mapped[str] = mapped_column(ForeignKey("models.id"))
    forced: Mapped[bool]
    reason: Mapped[str | None]
    promoted_by: Mapped[str | None]  # name of the key
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("NOT forced OR reason IS NOT NULL", name="force_has_a_reason"),
        Index("promotions_alias_seq_idx", "alias", "seq"),
        Index("promotions_model_id_idx", "model_id"),
        Index("promotions_project_alias_seq_idx", "project", "alias", "seq"),
    )


class ServingRow(Table):
    """One process of the API serves a promotion, or refuses to; a trigger refuses UPDATE and DELETE."""

    __tablename__ = "servings"

    seq: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    promotion_id: Mapped[str] = mapped_column(ForeignKey("promotions.id"))
    outcome: Mapped[Literal["served", "refused"]] = mapped_column(CleanText)
    engine: Mapped[str | None]  # that serves it
    why: Mapped[str | None]  # it was refused
    transient: Mapped[bool]  # it is retried
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("outcome IN ('served', 'refused')", name="outcome_known"),
        CheckConstraint("(outcome = 'served') = (engine IS NOT NULL)", name="served_by_an_engine"),
        CheckConstraint("(outcome = 'refused') = (why IS NOT NULL)", name="refused_for_a_reason"),
        Index("servings_promotion_id_seq_idx", "promotion_id", "seq"),
    )


class EpochRow(Table):
    """The identity that this database shares with its data directory, and a counter that only grows."""

    __tablename__ = "epochs"

    id: Mapped[str] = mapped_column(primary_key=True)
    counter: Mapped[int] = mapped_column(BigInteger, server_default="0")
    ticked_at: Mapped[datetime] = mapped_column(server_default=func.now())
    only_row: Mapped[bool] = mapped_column(unique=True, server_default=text("true"))

    __table_args__ = (CheckConstraint("only_row", name="one_row"),)


class UsageSampleRow(Table):
    """The use of the disk at one moment."""

    __tablename__ = "usage_samples"

    taken_at: Mapped[datetime] = mapped_column(primary_key=True, server_default=func.now())
    disk_total_bytes: Mapped[int] = mapped_column(BigInteger)
    disk_used_bytes: Mapped[int] = mapped_column(BigInteger)
    stored_bytes: Mapped[dict[str, int]] = mapped_column(CleanJson)  # by kind of file


class AuditRow(Table):
    """One write by the API; a trigger refuses UPDATE, TRUNCATE, and DELETE of what has not expired."""

    __tablename__ = "audit"

    seq: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    key_name: Mapped[str]
    key_id: Mapped[str | None]  # the beginning of its hash
    project: Mapped[str]  # of the key; no filter of a project's session applies
    action: Mapped[str]
    target: Mapped[str | None]
    created: Mapped[str | None]
    address: Mapped[str | None]
    request_id: Mapped[str | None]
    outcome: Mapped[Literal["done", "refused", "failed"]] = mapped_column(CleanText)
    status: Mapped[int | None]
    detail: Mapped[str | None]

    __table_args__ = (
        CheckConstraint("outcome IN ('done', 'refused', 'failed')", name="outcome_known"),
        Index("audit_created_at_idx", "created_at"),
        Index("audit_target_seq_idx", "target", "seq"),
    )


class MaintenanceRow(Table):
    """The only row says that maintenance mode is on."""

    __tablename__ = "maintenance"

    only_row: Mapped[bool] = mapped_column(primary_key=True, server_default=sqlalchemy.true())
    reason: Mapped[str]
    started_by: Mapped[str]  # name of the key
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (CheckConstraint("only_row", name="one_row"),)


class QueueTurnRow(Table):
    """When a job of a line, the queued jobs of one kind, project and priority, was last claimed."""

    __tablename__ = "queue_turns"

    kind: Mapped[Kind] = mapped_column(CleanText, primary_key=True)
    project: Mapped[str] = mapped_column(primary_key=True)
    priority: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    claimed_at: Mapped[datetime]


class ApiProcessRow(Table):
    """A process of the API; one that ends takes its row along, or is forgotten after an hour."""

    __tablename__ = "api_processes"

    name: Mapped[str] = mapped_column(primary_key=True)
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ProcessServingRow(Table):
    """What one process of the API has made of a promotion, until its alias serves another."""

    __tablename__ = "process_servings"

    process: Mapped[str] = mapped_column(
        ForeignKey("api_processes.name", ondelete="CASCADE"), primary_key=True
    )
    promotion_id: Mapped[str] = mapped_column(ForeignKey("promotions.id"), primary_key=True)
    outcome: Mapped[Literal["served", "refused"]] = mapped_column(CleanText)
    engine: Mapped[str | None]
    why: Mapped[str | None]
    transient: Mapped[bool]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("outcome IN ('served', 'refused')", name="outcome_known"),
        Index("process_servings_promotion_id_idx", "promotion_id"),
    )
