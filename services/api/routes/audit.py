"""The audit log, for administrators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from services.api.auth.callers import requires
from services.api.auth.keys import Scope
from services.api.deps import ContextDep, Limit, SeqCursor
from services.api.openapi import problems
from services.shared.jobs.views import AuditView, Page

router = APIRouter(
    tags=["operations"],
    dependencies=[Depends(requires(Scope.ADMIN))],
    responses=problems(401, 403, 422, 429, 500, 503),
)

Name = Annotated[str | None, Query(min_length=1, max_length=120)]


@router.get("/audit", operation_id="list_audit")
def list_audit(
    context: ContextDep,
    key: Name = None,
    project: Name = None,
    action: Name = None,
    target: Name = None,
    cursor: SeqCursor = None,
    limit: Limit = 50,
) -> Page[AuditView]:
    """List who wrote what, newest first; `target` is the id of what was changed or created."""
    return context.audit.page(
        key_name=key, project=project, action=action, target=target, cursor=cursor, limit=limit
    )
