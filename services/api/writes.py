"""What every write has in common: it is refused during maintenance, and recorded in the audit log.

Both look at the method, not at a list of routes, so that a new route cannot be forgotten.
"""

from __future__ import annotations

from datetime import datetime, timezone

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.auth.authentication import is_public
from services.api.auth.callers import Caller, authenticate
from services.api.deps import AppContext
from services.api.problems import ProblemError, problem_response
from services.shared.jobs.db.audit import AuditEntry, AuditOutcome
from services.shared.jobs.errors import Unavailable

STORES_NOTHING = frozenset(
    {"/predict", "/v1/classify", "/jobs/plan", "/datasets/preview", "/diagnoses"}
)
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
# Maintenance is ended by a write, and seen by those who sign in.
_DURING_MAINTENANCE = frozenset({"/maintenance", "/session"})
MAINTENANCE_RETRY_SECONDS = 60
_RATE_LIMITED = 429  # not recorded: a key could fill the log with what was not even looked at


def is_write(scope: Scope) -> bool:
    """Return whether a request may change what is stored."""
    return (
        scope["type"] == "http"
        and scope["method"] not in _READING
        and scope["path"] not in STORES_NOTHING
        and not is_public(scope["path"])  # which have no write, and whose callers have no key
    )


class MaintenanceMiddleware:
    """ASGI middleware that answers writes with 503 and the reason while maintenance mode is on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_write(scope) and scope["path"] not in _DURING_MAINTENANCE:
            context: AppContext = scope["app"].state.context
            try:
                current = await run_in_threadpool(context.maintenance.current)
            except Unavailable:
                current = None  # the write itself reports that
            if current is not None:
                problem = ProblemError(
                    "maintenance",
                    f"Maintenance since {current.started_at:%Y-%m-%d %H:%M} UTC, no changes for now: "
                    f"{current.reason}",
                    headers={
                        "Retry-After": str(MAINTENANCE_RETRY_SECONDS),
                        "Connection": "close",  # the body stays unread
                    },
                )
                await problem_response(problem, path=scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


class AuditMiddleware:
    """ASGI middleware that records each write before its response is sent; inside authentication."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_write(scope):
            await self._app(scope, receive, send)
            return
        context: AppContext = scope["app"].state.context
        caller = authenticate(Request(scope))
        started = datetime.now(timezone.utc)

        async def record(status: int, headers: Headers) -> None:
            entry = _entry(scope, caller, status=status, headers=headers, at=started)
            if entry is not None:
                await run_in_threadpool(context.audit.record, entry)

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                await record(message["status"], Headers(raw=message["headers"]))
            await send(message)

        try:
            await self._app(scope, receive, send_recorded)
        except Exception:
            await record(500, Headers())
            raise


def _entry(
    scope: Scope, caller: Caller, *, status: int, headers: Headers, at: datetime
) -> AuditEntry | None:
    """Return the entry of a write, or None for one that reached no route or no decision."""
    action = getattr(scope.get("route"), "operation_id", None)
    if action is None or status == _RATE_LIMITED:
        return None
    location = headers.get("location", "")
    return AuditEntry(
        key_name=caller.name,
        key_id=None if caller.key is None else caller.key.sha256[:16],
        project=caller.project,
        action=action,
        target=next(iter(scope.get("path_params", {}).values()), None),
        created=location.rpartition("/")[2] or None,
        address=caller.address or None,
        request_id=scope.get("request_id"),
        outcome=_outcome(status),
        status=status,
        created_at=at,
    )


def _outcome(status: int) -> AuditOutcome:
    if status < 400:
        return "done"
    return "refused" if status < 500 else "failed"
