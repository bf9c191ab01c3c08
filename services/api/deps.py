"""Dependencies of the routes: the application context, ids and paging parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from fastapi import Depends, Path, Query, Request

from services.api.auth.callers import Caller, authenticate
from services.api.auth.keys import Keys
from services.api.auth.sessions import SECRET_FILE, Sessions
from services.api.event_streams import EventStreams, StreamLimiter
from services.api.job_list_streams import JobListStreams
from services.api.limits.rate_limit import RateLimiters
from services.api.limits.uploads import UploadLimiter
from services.api.sandboxes import Sandboxes
from services.api.serving.prediction import Prediction
from services.api.settings import ApiSettings
from services.api.statistics_cache import StatisticsCache
from services.api.telemetry import Metrics
from services.shared.datasets.card import Head
from services.shared.datasets.text import Text
from services.shared.jobs.db.audit import AuditLog
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.maintenance import Maintenance
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import NotFound
from services.shared.jobs.projects import DEFAULT_PROJECT
from services.shared.jobs.resolved_spec import PlannedSpec, ResolvedSpec
from services.shared.jobs.spec import DistillSpec, TeacherSpec
from services.shared.jobs.views import Kind


class Student(Protocol):
    """The model that currently serves an alias."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def heads(self) -> list[Head]: ...
    @property
    def max_length(self) -> int: ...


class Predictor(Protocol):
    """The interface of the serving package that the routes use."""

    def active(self, alias: str = "default") -> Student | None: ...
    def aliases(self) -> Sequence[str]: ...
    async def predict(
        self, texts: Sequence[Text], *, truncate: bool, alias: str = "default"
    ) -> Sequence[Prediction]:
        """Classify texts. Raises the errors of `serving.errors`."""
        ...


class Admission(Protocol):
    """What happens to a spec before a job is stored."""

    def resolve(
        self,
        spec: TeacherSpec | DistillSpec,
        *,
        project: str = DEFAULT_PROJECT,
        chained: ResolvedSpec | None = None,
    ) -> ResolvedSpec:
        """Look up everything a spec of a project refers to; `chained` is its teacher in a chain.

        Raises InvalidRequest.
        """
        ...

    def plan(self, resolved: ResolvedSpec) -> PlannedSpec:
        """Return what to store with the job. Raises InvalidRequest, and DoesNotFit with the plan."""
        ...


Send = Callable[[str, Kind], bool]  # job id, kind -> False if the broker is unreachable
Probe = Callable[[], object]  # raises Unavailable or OSError if its component is unreachable


@dataclass(frozen=True, kw_only=True)
class AppContext:
    """Everything that the routes depend on, assembled once by `main` or by a test."""

    settings: ApiSettings
    store: Store
    send: Send
    predictor: Predictor
    admission: Admission
    keys: Keys
    metrics: Metrics
    sandboxes: Sandboxes
    probes: Mapping[str, Probe] = field(default_factory=dict)
    rate_limiters: RateLimiters = field(default_factory=RateLimiters)
    upload_limiter: UploadLimiter = field(default_factory=UploadLimiter)
    audit: AuditLog = field(init=False)
    maintenance: Maintenance = field(init=False)
    event_streams: EventStreams = field(init=False)
    job_list_streams: JobListStreams = field(init=False)
    stream_limiter: StreamLimiter = field(init=False)
    sessions: Sessions = field(init=False)
    dataset_statistics: StatisticsCache = field(init=False)
    download_limiter: StreamLimiter = field(
        default_factory=lambda: StreamLimiter(max_streams=16, max_per_caller=4, what="downloads")
    )

    def __post_init__(self) -> None:
        settings = self.settings
        streams = EventStreams(self.store, poll_seconds=settings.event_poll_seconds)
        limiter = StreamLimiter(
            max_streams=settings.event_streams, max_per_caller=settings.event_streams_per_key
        )
        sessions = Sessions(
            settings.data_dir / SECRET_FILE,
            idle_seconds=settings.session_seconds,
            most_seconds=settings.session_most_seconds,
        )
        lists = JobListStreams(poll_seconds=settings.event_poll_seconds)
        object.__setattr__(self, "sessions", sessions)
        object.__setattr__(self, "dataset_statistics", StatisticsCache(settings))
        object.__setattr__(self, "job_list_streams", lists)
        object.__setattr__(self, "audit", AuditLog(self.store.engine))
        object.__setattr__(self, "maintenance", Maintenance(self.store.engine))
        object.__setattr__(self, "event_streams", streams)
        object.__setattr__(self, "stream_limiter", limiter)


async def _context(
    request: Request,
) -> AppContext:  # async: a sync dependency runs in a thread pool
    context: AppContext = request.app.state.context
    return context


ContextDep = Annotated[AppContext, Depends(_context)]


async def _caller(request: Request) -> Caller:
    return authenticate(request)


CallerDep = Annotated[Caller, Depends(_caller)]


async def _store(context: ContextDep, caller: CallerDep) -> Store:
    return context.store.within(caller.access)


# What the caller sees and creates: routes use no other store.
StoreDep = Annotated[Store, Depends(_store)]


async def _lifecycle(store: StoreDep) -> LifecycleStore:
    return LifecycleStore(store)


LifecycleDep = Annotated[LifecycleStore, Depends(_lifecycle)]

_ID = re.compile(r"[a-z]{2,4}_[0-9a-z_]{1,60}")


def _valid_id(kind: str, id: str) -> str:
    """Return the id. Raises NotFound for a malformed one, without a database query."""
    if not _ID.fullmatch(id):
        raise NotFound(kind, id[:80])
    return id


async def _job_id(job_id: Annotated[str, Path(examples=["job_01kb6ztn8e0wq4v7"])]) -> str:
    return _valid_id("job", job_id)


async def _dataset_id(dataset_id: Annotated[str, Path(examples=["ds_01kb6ztn8e0wq4v7"])]) -> str:
    return _valid_id("dataset", dataset_id)


async def _model_id(model_id: Annotated[str, Path(examples=["mdl_01kb6ztn8e0wq4v7_1"])]) -> str:
    return _valid_id("model", model_id)


JobId = Annotated[str, Depends(_job_id)]
DatasetId = Annotated[str, Depends(_dataset_id)]
ModelId = Annotated[str, Depends(_model_id)]

Limit = Annotated[int, Query(ge=1, le=500, description="Maximum number of items per page.")]
Cursor = Annotated[
    str | None,
    Query(
        max_length=200,
        pattern=r"^[A-Za-z0-9_=-]+$",
        description="`next_cursor` of the previous page.",
    ),
]
SeqCursor = Annotated[
    str | None, Query(pattern=r"^[0-9]{1,18}$", description="`next_cursor` of the previous page.")
]
Deleted = Annotated[
    bool, Query(description="What is deleted and can still be restored, instead of what is not.")
]
ALIAS_PATTERN = r"^[a-z][a-z0-9_-]{0,63}$"
Alias = Annotated[
    str, Query(pattern=ALIAS_PATTERN, description="The name under which a model serves.")
]
