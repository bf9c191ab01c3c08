"""Jobs: submit, list, show, cancel, retry. The output of their runs is in `runs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, Body, Depends, Header, Query, Request
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.responses import Response

from services.api.auth.callers import require_scope, requires
from services.api.auth.keys import Scope
from services.api.deps import (
    Admission,
    AppContext,
    CallerDep,
    ContextDep,
    Cursor,
    Deleted,
    JobId,
    LifecycleDep,
    Limit,
    StoreDep,
)
from services.api.limits.body import screen_json, text_fault
from services.api.openapi import links, problems
from services.api.problems import invalid_field
from services.shared.jobs.errors import prefix_field
from services.shared.jobs.planning.spec_changes import change_spec
from services.shared.jobs.resolved_spec import PlannedSpec
from services.shared.jobs.spec import ChainSpec, JobRequest, Recipe, Training
from services.shared.jobs.state import JobState
from services.shared.jobs.views import DeletionView, JobSummary, JobView, Kind, Page

log = structlog.get_logger(__name__)

reads = APIRouter(
    tags=["jobs"],
    dependencies=[Depends(requires(Scope.READ))],
    responses=problems(401, 404, 422, 429, 500, 503),
)
writes = APIRouter(
    tags=["jobs"],
    dependencies=[Depends(requires(Scope.SUBMIT)), Depends(screen_json)],
    responses=problems(400, 401, 403, 404, 409, 413, 422, 429, 500, 503),
)

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        pattern=r"^[!-~]+$",
        description="A second request with the same key and body gets the first one's job (of a "
        "chain: both).",
    ),
]
_ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {
        "headers": {
            "Location": {"schema": {"type": "string"}, "description": "The job."},
            "Idempotent-Replayed": {
                "schema": {"type": "string"},
                "description": "`true` where the key's job existed already.",
            },
        },
        "links": links(
            "job_id",
            "get_job",
            "watch_job",
            "get_job_log",
            "get_job_memory",
            "get_job_metrics",
            "cancel_job",
            "retry_job",
        ),
    }
}
_EXAMPLE = {
    "kind": "teacher",
    "dataset_id": "ds_01kb6ztn8e0wq4v7",
    "model": {"path": "Qwen3-32B"},
    "training": {"epochs": 3, "learning_rate": 2e-5},
    "recipe": {"optimizer": "adamw_bf16"},
    "resources": {"ranks": 8, "device": "k100_ai"},
}
_CHAIN_EXAMPLE = {
    "kind": "chain",
    "teacher": {"dataset_id": "ds_01kb6ztn8e0wq4v7", "model": {"path": "Qwen3-32B"}},
    "distill": {"student": {"path": "Qwen3-0.6B"}, "promote": "when_passed"},
}
RequestBody = Annotated[JobRequest, Body(examples=[_EXAMPLE, _CHAIN_EXAMPLE])]


@writes.post("/jobs", operation_id="create_job", status_code=202, responses=_ACCEPTED)
def create_job(
    body: RequestBody,
    context: ContextDep,
    store: StoreDep,
    request: Request,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Plan a job, refuse it if it cannot fit, store it, and send it to its worker.

    A chain is two jobs, both or neither; the answer is its teacher, whose `child_job_ids` names the
    distillation that waits for it.
    """
    for spec in (body.teacher, body.distill) if isinstance(body, ChainSpec) else (body,):
        _check_effects(spec, request)
    if isinstance(body, ChainSpec):
        teacher, distill = _plan_chain(body, context.admission, project=store.access.project)
        job, created = store.create_chain(
            body,
            teacher=teacher,
            distill=distill,
            idempotency_key=idempotency_key,
        )
    else:
        resolved = context.admission.resolve(body, project=store.access.project)
        planned = context.admission.plan(resolved)
        job, created = store.create_job(planned, idempotency_key=idempotency_key)
    return _accepted(job, context=context, response=response, created=created)


def _check_effects(spec: object, request: Request) -> None:
    """Require the scopes for what a job does besides running. Raises ProblemError."""
    if getattr(spec, "promote", "never") != "never":
        require_scope(request, Scope.PROMOTE, effect="`promote`")
    if getattr(spec, "priority", 0) > 0:  # before the jobs of other projects
        require_scope(request, Scope.ADMIN, effect="`priority` above 0")


def _plan_chain(
    chain: ChainSpec, admission: Admission, *, project: str
) -> tuple[PlannedSpec, PlannedSpec]:
    """Return what is stored with the two jobs. Raises InvalidRequest, DoesNotFit naming the part."""
    with prefix_field("teacher"):
        teacher = admission.plan(admission.resolve(chain.teacher_spec(), project=project))
    with prefix_field("distill"):
        resolved = admission.resolve(
            chain.distill_spec(), project=project, chained=teacher.resolved
        )
        return teacher, admission.plan(resolved)


def _optional(model: type[BaseModel], *, base: type[BaseModel]) -> Any:
    """Return a model with the same fields, all of them optional, and those of `base`."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        for rule in field.metadata:  # bounds, and what counts as a number
            kind = Annotated[kind, rule]
        fields[name] = (kind | None, Field(None, description=field.description))
    return create_model(f"{model.__name__}Changes", __base__=base, **fields)


class _Changes(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Placed(_Changes):
    """What a remedy may change besides the recipe."""

    teacher_placement: Literal["sharded", "replicated"] | None = Field(
        None, description="Of a distillation: its teacher over all ranks, or whole on each."
    )


RecipeChanges: Any = _optional(Recipe, base=_Placed)
TrainingChanges: Any = _optional(Training, base=_Changes)


class RetryRequest(BaseModel):
    """What to change; a remedy of the diagnosis can be sent as it is."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"changes": {"optimizer": "adafactor"}}]}
    )

    changes: RecipeChanges | None = Field(None, description="Fields of the recipe.")
    training: TrainingChanges | None = Field(None, description="Fields of the training.")


@writes.post("/jobs/{job_id}/retry", operation_id="retry_job", status_code=202, responses=_ACCEPTED)
def retry_job(
    job_id: JobId,
    context: ContextDep,
    store: StoreDep,
    request: Request,
    response: Response,
    body: RetryRequest | None = None,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Repeat a failed or cancelled job as a new one that resumes from its checkpoints.

    Distillations that failed with a teacher are repeated with it, and wait for it.
    """
    changes = body.model_dump(mode="json", exclude_unset=True) if body else {}
    recipe_changes, training_changes = changes.get("changes") or {}, changes.get("training") or {}
    former = store.job(job_id)
    for each in (former, *map(store.job, former.child_job_ids)):  # retried with it
        _check_effects(each.spec, request)
    changed = change_spec(
        former.spec,
        recipe=former.recipe,
        recipe_changes=recipe_changes,
        training_changes=training_changes,
    )
    resolved = context.admission.resolve(changed.spec, project=former.project)
    planned = context.admission.plan(resolved)
    job, created = store.retry(
        job_id,
        changed,
        plan=planned.plan,
        idempotency_key=idempotency_key,
    )
    return _accepted(job, context=context, response=response, created=created)


@writes.post("/jobs/{job_id}/cancel", operation_id="cancel_job", status_code=202)
def cancel_job(job_id: JobId, store: StoreDep) -> JobView:
    """Stop a job: at once while it waits, after a checkpoint while it runs. Twice is harmless."""
    return store.request_cancel(job_id)


@writes.delete("/jobs/{job_id}", operation_id="delete_job")
def delete_job(job_id: JobId, lifecycle: LifecycleDep, caller: CallerDep) -> DeletionView:
    """Delete a job that has ended, with its run directories; its model stays."""
    return lifecycle.delete("job", job_id, by=caller.name)


@writes.post("/jobs/{job_id}/restore", operation_id="restore_job")
def restore_job(job_id: JobId, lifecycle: LifecycleDep, store: StoreDep) -> JobView:
    """Undo the deletion of a job."""
    lifecycle.restore("job", job_id)
    return store.job(job_id)


@reads.get("/jobs", operation_id="list_jobs")
def list_jobs(
    store: StoreDep,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    kind: Annotated[Kind | None, Query(description="Only jobs of this kind.")] = None,
    search: Annotated[
        str | None,
        Query(min_length=1, max_length=120, description="Only jobs with this in their name or id."),
    ] = None,
    created_by: Annotated[
        str | None,
        Query(min_length=1, max_length=120, description="Only jobs that this key has submitted."),
    ] = None,
    deleted: Deleted = False,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[JobSummary]:
    """List jobs, the newest first."""
    for field, text in (("search", search), ("created_by", created_by)):
        if text is not None and (fault := text_fault(text)):
            raise invalid_field(f"query.{field}", f"The text {fault}.")
    return store.list_jobs(
        state=state,
        kind=kind,
        search=search,
        created_by=created_by,
        deleted=deleted,
        cursor=cursor,
        limit=limit,
    )


@reads.get("/jobs/{job_id}", operation_id="get_job")
def get_job(job_id: JobId, store: StoreDep) -> JobView:
    """Show a job: state, progress, metrics, planned and measured memory, and a failure's diagnosis."""
    return store.job(job_id)


def _accepted(job: JobView, *, context: AppContext, response: Response, created: bool) -> JobView:
    response.headers["Location"] = f"/jobs/{job.id}"
    if not created:
        response.headers["Idempotent-Replayed"] = "true"
    elif job.state is JobState.QUEUED and not context.send(job.id, job.kind):
        # The row is committed, so the job is accepted: the sweep sends it when the broker is back.
        log.warning("job_not_sent", job_id=job.id)
    return job
