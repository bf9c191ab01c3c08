"""The store: the operations of API, workers and sweep on the database. One method is one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta

from sqlalchemy import Engine, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from services.shared.datasets.card import DatasetCard
from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.jobs.db import attempt_queries, job_queries, model_queries, retries, turns
from services.shared.jobs.db.claims import claimed_references, make_claim
from services.shared.jobs.db.connection import create_engine, transaction
from services.shared.jobs.db.pagination import checked_limit, shown
from services.shared.jobs.db.references import load_references
from services.shared.jobs.db.schema_version import check_schema_version
from services.shared.jobs.db.tables import DatasetRow
from services.shared.jobs.documents import JobPlanDict, ProgressDict
from services.shared.jobs.errors import Conflict, NotFound
from services.shared.jobs.gates import GateFloor, Int8Gate
from services.shared.jobs.ids import new_token
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.paths import highest_attempt
from services.shared.jobs.planning.spec_changes import ChangedSpec
from services.shared.jobs.projects import Access
from services.shared.jobs.resolved_spec import PlannedSpec, ResolvedSpec, resolve_directories
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import ChainSpec, DistillSpec, TeacherSpec
from services.shared.jobs.state import JobState, Phase
from services.shared.jobs.views import (
    AttemptView,
    Claim,
    DatasetView,
    EventView,
    FinishResult,
    HeartbeatReply,
    JobChanges,
    JobCounts,
    JobSummary,
    JobView,
    Kind,
    ModelView,
    Page,
    PlanError,
    PromotionView,
    QueuedJob,
)


def open_store(settings: JobSettings) -> Store:
    """Return a store on the database of the settings; connects on first use."""
    return Store(create_engine(settings.database_url), settings)


class Store:
    """Datasets, jobs, attempts, events, models, promotions.

    Every method raises Unavailable when the database does not answer.
    """

    def __init__(self, engine: Engine, settings: JobSettings, *, access: Access = Access()) -> None:
        self.engine = engine
        self.settings = settings
        self.access = access

    def within(self, access: Access) -> Store:
        """Return a store on the same database that sees and creates only what `access` permits."""
        return Store(self.engine, self.settings, access=access)

    def _transaction(self) -> AbstractContextManager[Session]:
        return transaction(self.engine, project=self.access.visible_project)

    def ping(self) -> None:
        """Check that the database accepts writes. Raises Unavailable."""
        with self._transaction() as session:
            # Changes nothing, and is refused by a read-only database as any other write.
            session.execute(text("UPDATE jobs SET worker = worker WHERE false"))

    def check_schema(self) -> None:
        """Check that no migration is missing. Raises OldSchema, and Unavailable."""
        with self._transaction() as session:
            check_schema_version(session)

    # Datasets

    def add_dataset(self, card: DatasetCard, *, size_bytes: int = 0) -> DatasetView:
        """Register a dataset whose files are already in `settings.dataset_dir(card.id)`."""
        with self._transaction() as session:
            row = session.scalars(
                insert(DatasetRow)
                .values(
                    id=card.id,
                    card=card.model_dump(mode="json"),
                    project=self.access.project,
                    created_by=self.access.actor,
                    size_bytes=size_bytes,
                )
                .returning(DatasetRow)
            ).one()
            return _dataset_view(row)

    def dataset(self, dataset_id: str) -> DatasetView:
        """Return a dataset; raises NotFound."""
        with self._transaction() as session:
            row = session.get(DatasetRow, dataset_id)
            if row is None or row.purged_at is not None:
                raise NotFound("dataset", dataset_id)
            return _dataset_view(row)

    def list_datasets(
        self, *, deleted: bool = False, cursor: str | None = None, limit: int = 50
    ) -> Page[DatasetView]:
        """Return datasets, newest first; raises InvalidRequest for a limit outside of 1 to 500."""
        query = (
            select(DatasetRow)
            .where(*shown(DatasetRow, deleted=deleted))
            .order_by(DatasetRow.id.desc())
        )
        if cursor is not None:
            query = query.where(DatasetRow.id < cursor)
        with self._transaction() as session:
            rows = session.scalars(query.limit(checked_limit(limit) + 1)).all()
        items = [_dataset_view(row) for row in rows[:limit]]
        return Page(items=items, next_cursor=items[-1].id if len(rows) > limit else None)

    # Jobs

    def resolve(
        self, spec: TeacherSpec | DistillSpec, *, chained: ResolvedSpec | None = None
    ) -> ResolvedSpec:
        """Look up everything that a spec of the access's project refers to.

        `chained` is the teacher of a chain. Raises InvalidRequest for references that do not exist in
        the project, do not match, or lead out of the model roots.
        """
        with transaction(self.engine, project=self.access.project) as session:
            references = load_references(session, spec, chained=chained)
        return resolve_directories(spec, references, settings=self.settings, chained=chained)

    def create_job(
        self,
        planned: PlannedSpec,
        *,
        idempotency_key: str | None = None,
    ) -> tuple[JobView, bool]:
        """Store a job; return it and whether it is new: send it after that if it is `queued`.

        The same key with the same spec gives the same job again. Raises InvalidRequest for a teacher
        job that has failed, and for a key used with another spec.
        """
        with self._transaction() as session:
            job_id, created = job_queries.create(
                session,
                planned.resolved.spec,
                plan=planned.plan,
                recipe=planned.recipe,
                access=self.access,
                idempotency_key=idempotency_key,
            )
            return job_queries.view(session, job_id), created

    def create_chain(
        self,
        chain: ChainSpec,
        *,
        teacher: PlannedSpec,
        distill: PlannedSpec,
        idempotency_key: str | None = None,
    ) -> tuple[JobView, bool]:
        """Store both jobs of a chain or neither; return the teacher job and whether they are new.

        Raises what `create_job` raises; its field then begins with the part, `teacher` or `distill`.
        """
        with self._transaction() as session:
            teacher_id, created = job_queries.create_chain(
                session,
                chain,
                teacher=teacher,
                distill=distill,
                access=self.access,
                idempotency_key=idempotency_key,
            )
            return job_queries.view(session, teacher_id), created

    def job(self, job_id: str) -> JobView:
        """Return a job with its attempts; raises NotFound."""
        with self._transaction() as session:
            return job_queries.view(session, job_id)

    def list_jobs(
        self,
        *,
        state: JobState | None = None,
        kind: Kind | None = None,
        search: str | None = None,
        created_by: str | None = None,
        deleted: bool = False,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[JobSummary]:
        """Return jobs, newest first; raises InvalidRequest for a limit outside of 1 to 500.

        `search` is a part of their names or ids, `created_by` the name of a key.
        """
        with self._transaction() as session:
            return job_queries.list_page(
                session,
                state=state,
                kind=kind,
                search=search,
                created_by=created_by,
                deleted=deleted,
                cursor=cursor,
                limit=limit,
            )

    def job_changes(self, *, after_seq: int | None, limit: int = 500) -> JobChanges:
        """Return the jobs with events after one of them, and those that run; for None only the latter."""
        with self._transaction() as session:
            return job_queries.changes(session, after_seq=after_seq, limit=limit)

    def job_counts(self) -> list[JobCounts]:
        """Return how many jobs of each kind wait, are queued or run."""
        with self._transaction() as session:
            return job_queries.counts(session)

    def events(self, job_id: str, *, after_seq: int = 0, limit: int = 100) -> list[EventView]:
        """Return events of a job after one of them, in order; raises NotFound."""
        with self._transaction() as session:
            return job_queries.events(session, job_id, after_seq=after_seq, limit=limit)

    def attempts(self, job_id: str) -> list[AttemptView]:
        """Return the attempts of a job in order; raises NotFound."""
        with self._transaction() as session:
            return job_queries.attempts(session, job_id)

    def plan_errors(self, *, limit: int = 100) -> list[PlanError]:
        """Return how far the plans of the last succeeded jobs were off, by device and phase."""
        with self._transaction() as session:
            return job_queries.plan_errors(session, limit=limit)

    def request_cancel(self, job_id: str) -> JobView:
        """Cancel a job that has not started, or request the worker of a running one to stop.

        Idempotent. Raises NotFound, and InvalidTransition for a job that has ended
        otherwise.
        """
        with self._transaction() as session:
            job_queries.request_cancel(session, job_id)
            return job_queries.view(session, job_id)

    def retry(
        self,
        job_id: str,
        changed: ChangedSpec,
        *,
        plan: JobPlanDict | None = None,
        idempotency_key: str | None = None,
    ) -> tuple[JobView, bool]:
        """Store a new job that repeats a failed or cancelled one and resumes from its checkpoints.

        Distillations that failed with a teacher are repeated with it, and wait for it. Returns the
        job and whether it is new, as `create_job` does. Raises NotFound, InvalidTransition,
        InvalidRequest.
        """
        with self._transaction() as session:
            new, created = retries.retry(
                session,
                job_id,
                changed,
                plan=plan,
                access=self.access,
                idempotency_key=idempotency_key,
            )
            return job_queries.view(session, new), created

    # Attempts: what workers do

    def next_in_turn(self, job_id: str, *, passed_over: Sequence[str] = ()) -> str | None:
        """Return the job that a worker is to claim when it gets the message of `job_id`.

        It is of the same kind; which one depends on priorities and on the turns of projects. Returns
        None if none is queued, except those `passed_over`, and during maintenance.
        """
        with self._transaction() as session:
            return turns.next_in_turn(
                session,
                job_id,
                aging_seconds=self.settings.queue_aging_seconds,
                passed_over=passed_over,
            )

    def claim(
        self, job_id: str, *, worker: str, lease_seconds: float, token: str | None = None
    ) -> Claim | None:
        """Take a queued job for this worker, or return None: a duplicate message, or no such job.

        Idempotent for a `token`: repeated after Unavailable, it returns the claim that was made.
        """
        last_on_disk = highest_attempt(self.settings, job_id)
        with self._transaction() as session:
            claimed = attempt_queries.claim(
                session,
                job_id,
                worker=worker,
                token=token or new_token(),
                lease_seconds=lease_seconds,
                last_on_disk=last_on_disk,
            )
            if claimed is None:
                return None
            references = claimed_references(session, claimed)
        return make_claim(claimed, references, settings=self.settings)

    def settle(self, claim: Claim) -> bool:
        """Store what was decided for a claim before its ranks start; False when the lease was lost."""
        with transaction(self.engine) as session:
            return attempt_queries.settle(
                session,
                claim.job_id,
                attempt=claim.attempt,
                token=claim.token,
                spec=claim.spec,
                recipe=claim.recipe,
                plan=claim.plan,
            )

    def heartbeat(
        self,
        claim: Claim,
        *,
        phase: Phase | None = None,
        progress: ProgressDict | None = None,
        lease_seconds: float,
    ) -> HeartbeatReply:
        """Renew the lease and copy progress to the job."""
        with self._transaction() as session:
            return attempt_queries.heartbeat(
                session,
                claim.job_id,
                attempt=claim.attempt,
                token=claim.token,
                phase=phase,
                progress=progress,
                lease_seconds=lease_seconds,
            )

    def finish(self, claim: Claim, outcome: Outcome) -> FinishResult:
        """Apply how the attempt ended, and everything that follows, in one transaction.

        Not applied when the lease was lost: then the result is to be discarded. May be repeated
        after Unavailable, when it is unknown whether the commit was applied. An outcome that
        succeeded has its report, and its artifact in `settings.model_dir(claim.model_id)`.
        """
        with self._transaction() as session:
            return attempt_queries.finish(
                session,
                claim.job_id,
                attempt=claim.attempt,
                token=claim.token,
                outcome=outcome,
                floor=GateFloor(
                    min_macro_f1_share=self.settings.gate_min_macro_f1_share,
                    min_macro_f1=self.settings.gate_min_macro_f1,
                    min_gain_over_baseline=self.settings.gate_min_gain_over_baseline,
                ),
            )

    def hand_back(self, claim: Claim) -> FinishResult:
        """Queue the job again without using up an attempt: this worker shuts down."""
        message = "Returned to the queue by a worker that is shutting down."
        return self.finish(claim, Outcome(end=End.HANDED_BACK, message=message))

    # What the sweep does

    def end_lost_attempts(
        self, *, now: datetime | None = None, limit: int = 100
    ) -> list[QueuedJob]:
        """End attempts whose lease ran out, by the database's clock or by `now`; return what to send."""
        with self._transaction() as session:
            return attempt_queries.end_lost(session, now=now, limit=limit)

    def overdue_jobs(
        self, kind: Kind, *, sent_before: datetime | timedelta, limit: int = 100
    ) -> list[QueuedJob]:
        """Mark the longest queued jobs that were last sent before a moment (or an age) as sent now."""
        with self._transaction() as session:
            return attempt_queries.overdue(session, kind, sent_before=sent_before, limit=limit)

    def attempts_without_result(self, attempts: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return those of (job id, attempt) that are over and have made no model."""
        with self._transaction() as session:
            return attempt_queries.without_result(session, attempts)

    def succeeded_among(self, job_ids: list[str]) -> list[str]:
        """Return those of the jobs that have succeeded."""
        with self._transaction() as session:
            return attempt_queries.succeeded_among(session, job_ids)

    # Models and promotions

    def model(self, model_id: str) -> ModelView:
        """Return a model by its id or its job's; raises NotFound, Conflict for a job without one."""
        with self._transaction() as session:
            return model_queries.view(session, model_id, settings=self.settings)

    def list_models(
        self,
        *,
        kind: Kind | None = None,
        deleted: bool = False,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[ModelView]:
        """Return models, newest job first; raises InvalidRequest for a limit outside of 1 to 500."""
        with self._transaction() as session:
            return model_queries.list_page(
                session,
                kind=kind,
                deleted=deleted,
                cursor=cursor,
                limit=limit,
                settings=self.settings,
            )

    def promote(
        self,
        model_id: str,
        *,
        alias: str = model_queries.DEFAULT_ALIAS,
        force: bool = False,
        reason: str | None = None,
    ) -> PromotionView:
        """Serve this model under an alias from now on.

        Raises NotFound; Conflict for a job without a model or an artifact that is gone; GateNotPassed
        without `force`; InvalidRequest for `force` without a reason or an impossible alias.
        """
        with self._transaction() as session:
            model = model_queries.view(session, model_id, settings=self.settings)
            if not (model.path / MANIFEST).is_file():
                raise Conflict(f"The artifact of model {model.id} is no longer at {model.path}.")
            return model_queries.promote(
                session, model, alias=alias, force=force, reason=reason, actor=self.access.actor
            )

    def promotions(
        self, *, alias: str | None = None, cursor: str | None = None, limit: int = 50
    ) -> Page[PromotionView]:
        """Return promotions, newest first; raises InvalidRequest for a wrong cursor or limit."""
        with self._transaction() as session:
            return model_queries.promotions(session, alias=alias, cursor=cursor, limit=limit)

    def active(self, alias: str = model_queries.DEFAULT_ALIAS) -> PromotionView | None:
        """Return the promotion that an alias of the access's project serves, or None before the first."""
        with self._transaction() as session:
            return model_queries.active(session, alias, project=self.access.project)

    def report_served(self, promotion_id: str, *, engine: str) -> None:
        """Record that the API serves a promotion, and with which engine; idempotent."""
        with self._transaction() as session:
            model_queries.record_serving(session, promotion_id, engine=engine)

    def report_refused(self, promotion_id: str, why: str, *, transient: bool) -> None:
        """Record that the API refuses to serve a promotion; `transient` refusals are retried."""
        with self._transaction() as session:
            model_queries.record_serving(session, promotion_id, refused=why, transient=transient)

    def set_int8_gate(self, model_id: str, gate: Int8Gate) -> None:
        """Record whether a model may be served in 8 bits."""
        with self._transaction() as session:
            model_queries.set_int8_gate(session, model_id, gate)


def _dataset_view(row: DatasetRow) -> DatasetView:
    names = ("project", "created_at", "created_by", "deleted_at", "deleted_by")
    return DatasetView.model_validate({**row.card, **{n: getattr(row, n) for n in names}})
