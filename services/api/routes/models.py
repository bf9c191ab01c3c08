"""The registry of models, and which of them serves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict, Field

from services.api.auth.callers import requires
from services.api.auth.keys import Scope
from services.api.deps import (
    ALIAS_PATTERN,
    CallerDep,
    Cursor,
    Deleted,
    LifecycleDep,
    Limit,
    ModelId,
    SeqCursor,
    StoreDep,
)
from services.api.limits.body import screen_json
from services.api.openapi import problems
from services.shared.jobs.views import DeletionView, Kind, ModelView, Page, PromotionView

router = APIRouter(tags=["models"], responses=problems(401, 422, 429, 500, 503))


@router.get("/models", operation_id="list_models", dependencies=[Depends(requires(Scope.READ))])
def list_models(
    store: StoreDep,
    kind: Annotated[Kind | None, Query(description="Only models of this kind of job.")] = None,
    deleted: Deleted = False,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[ModelView]:
    """List models, the newest first."""
    return store.list_models(kind=kind, deleted=deleted, cursor=cursor, limit=limit)


@router.get(
    "/models/{model_id}",
    operation_id="get_model",
    dependencies=[Depends(requires(Scope.READ))],
    responses=problems(404, 409),
)
def get_model(model_id: ModelId, store: StoreDep) -> ModelView:
    """Show a model, by its id or its job's: heads, metrics, gate, and where it came from."""
    return store.model(model_id)


@router.delete(
    "/models/{model_id}",
    operation_id="delete_model",
    dependencies=[Depends(requires(Scope.PROMOTE))],
    responses=problems(403, 404, 409),
)
def delete_model(
    model_id: ModelId, store: StoreDep, lifecycle: LifecycleDep, caller: CallerDep
) -> DeletionView:
    """Delete a model that no alias serves and no unfinished job needs."""
    model = store.model(model_id)
    return lifecycle.delete("model", model.id, by=caller.name)


@router.post(
    "/models/{model_id}/restore",
    operation_id="restore_model",
    dependencies=[Depends(requires(Scope.PROMOTE))],
    responses=problems(403, 404, 409),
)
def restore_model(model_id: ModelId, store: StoreDep, lifecycle: LifecycleDep) -> ModelView:
    """Undo the deletion of a model."""
    model = store.model(model_id)
    lifecycle.restore("model", model.id)
    return store.model(model.id)


class PromoteRequest(BaseModel):
    """The alias that is to serve the model; `force` overrides the gate and requires a reason."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"alias": "default"}]}
    )

    alias: Annotated[str, Field(pattern=ALIAS_PATTERN)] = "default"
    force: bool = False
    reason: Annotated[str, Field(min_length=1, max_length=1000)] | None = None


@router.post(
    "/models/{model_id}/promote",
    operation_id="promote_model",
    status_code=201,
    dependencies=[Depends(requires(Scope.PROMOTE)), Depends(screen_json)],
    responses=problems(400, 403, 404, 409, 413),
)
def promote_model(
    model_id: ModelId, store: StoreDep, body: PromoteRequest | None = None
) -> PromotionView:
    """Serve this model under an alias of its project from now on. To roll back, promote the former one."""
    request = body or PromoteRequest()
    return store.promote(model_id, alias=request.alias, force=request.force, reason=request.reason)


@router.get(
    "/promotions", operation_id="list_promotions", dependencies=[Depends(requires(Scope.READ))]
)
def list_promotions(
    store: StoreDep,
    alias: Annotated[
        str | None, Query(pattern=ALIAS_PATTERN, description="Only promotions to this alias.")
    ] = None,
    cursor: SeqCursor = None,
    limit: Limit = 50,
) -> Page[PromotionView]:
    """List promotions, the newest first; nothing is ever changed or removed."""
    return store.promotions(alias=alias, cursor=cursor, limit=limit)
