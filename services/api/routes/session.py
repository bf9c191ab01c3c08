"""Signing in to the console: a key for a cookie that scripts cannot read."""

from __future__ import annotations

from datetime import datetime, timezone

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from services.api.auth.callers import Caller, limit_by_key
from services.api.auth.keys import Scope
from services.api.auth.sessions import COOKIE, Session
from services.api.deps import AppContext, CallerDep, ContextDep
from services.api.openapi import problems

router = APIRouter(
    tags=["session"],
    dependencies=[Depends(limit_by_key)],
    responses=problems(401, 403, 429, 500),
)


class SessionView(BaseModel):
    """Who the caller is, and what its key permits."""

    key: str | None = Field(description="The name of the key; null on a server without keys.")
    project: str
    scopes: list[Scope]
    csrf_token: str | None = Field(
        None,
        description="Of a session: send it as `X-CSRF-Token` with every request that is no GET.",
    )
    expires_at: datetime | None = Field(None, description="Of a session, unless it is renewed.")


@router.post("/session", operation_id="create_session", status_code=201)
def create_session(
    request: Request, response: Response, context: ContextDep, caller: CallerDep
) -> SessionView:
    """Exchange a key, sent as usual, for a session cookie: HttpOnly, SameSite=Strict, of an hour."""
    if caller.key is None:
        return _view(caller, None)
    cookie, session = context.sessions.start(caller.key)
    _set_cookie(response, cookie, request=request, context=context)
    return _view(caller, session)


@router.get("/session", operation_id="get_session")
def get_session(
    request: Request, response: Response, context: ContextDep, caller: CallerDep
) -> SessionView:
    """Show the caller's key, project and scopes; a session that is in use is renewed."""
    session = caller.session
    if caller.key is not None and session is not None:
        renewed = context.sessions.renew(caller.key, session)
        if renewed is not None:
            cookie, session = renewed
            _set_cookie(response, cookie, request=request, context=context)
    response.headers["Cache-Control"] = "no-store"
    return _view(caller, session)


@router.delete("/session", operation_id="delete_session", status_code=204)
def delete_session(response: Response, context: ContextDep, caller: CallerDep) -> None:
    """Sign out: the cookie is removed, and this process accepts the session no more."""
    if caller.session is not None:
        context.sessions.end(caller.session)
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")


def _view(caller: Caller, session: Session | None) -> SessionView:
    return SessionView(
        key=None if caller.key is None else caller.name,
        project=caller.project,
        scopes=[scope for scope in Scope if caller.allows(scope)],
        csrf_token=session and session.csrf_token,
        expires_at=session and datetime.fromtimestamp(session.expires, timezone.utc),
    )


def _set_cookie(response: Response, cookie: str, *, request: Request, context: AppContext) -> None:
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=int(context.settings.session_seconds),
        path="/",
        secure=request.url.scheme == "https",  # behind a proxy: see STILLHOUSE_TRUSTED_PROXIES
        httponly=True,
        samesite="strict",
    )
