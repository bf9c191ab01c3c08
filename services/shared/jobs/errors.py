"""Errors of requests about jobs; the failure of a job itself is not one.

    StillhouseError
    ├── NotFound            no such dataset, job, model
    ├── InvalidRequest        the request contradicts itself or what is stored
    ├── Conflict            the resource is not in the state that the request needs
    │   ├── InvalidTransition
    │   ├── InUse           something refers to what is to be deleted
    │   └── GateNotPassed
    ├── QueueQuotaExceeded    the key has as many queued jobs as it may have
    ├── StorageQuotaExceeded  the key stores as much as it may store
    ├── DoesNotFit          the memory plan refuses the job
    └── Unavailable         the database or the broker cannot be reached
        └── OldSchema       the database has not been migrated to what this version needs

An expected end of a run is a value (`jobs.outcome.Outcome`), never an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.shared.jobs.documents import JobPlanDict


class StillhouseError(Exception):
    """The root of the tree."""


class NotFound(StillhouseError):
    """The resource does not exist."""

    def __init__(self, what: str, id: str) -> None:
        super().__init__(f"There is no {what} {id!r}.")
        self.what = what
        self.id = id


class InvalidRequest(StillhouseError):
    """A well-formed request that contradicts itself or what is stored."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Conflict(StillhouseError):
    """The resource exists but is not in the state that the request needs."""


class InvalidTransition(Conflict):
    """The transition table has no such transition of a job."""

    def __init__(self, job_id: str, state: str, target: str) -> None:
        super().__init__(f"Job {job_id} is {state}; it cannot become {target}.")
        self.job_id = job_id
        self.state = state
        self.target = target


class InUse(Conflict):
    """Something refers to the resource that is to be deleted."""

    def __init__(self, resource: str, id: str, references: list[str]) -> None:
        more = f" (and {len(references) - 1} more; see references)" if len(references) > 1 else ""
        super().__init__(f"{resource.capitalize()} {id} is not deleted: {references[0]}{more}.")
        self.references = references


class GateNotPassed(Conflict):
    """A student lost too much of its teacher to be promoted without force."""

    def __init__(self, model_id: str, message: str) -> None:
        super().__init__(message)
        self.model_id = model_id


class QueueQuotaExceeded(StillhouseError):
    """A key has as many queued jobs as its quota allows."""

    def __init__(self, key: str, limit: int) -> None:
        super().__init__(
            f"The key {key} has {limit} queued jobs, which is its quota: send this one when some of them have "
            "started, or cancel some."
        )


class StorageQuotaExceeded(StillhouseError):
    """A key stores as many bytes as its quota allows."""

    def __init__(self, key: str, stored: int, limit: int) -> None:
        super().__init__(
            f"The key {key} stores {stored:,} bytes of datasets and models, and its quota is {limit:,}: "
            "delete some; their space is free after the grace period."
        )


class DoesNotFit(StillhouseError):
    """The job would run out of memory according to its plan."""

    def __init__(self, message: str, plan: JobPlanDict, *, field: str | None = None) -> None:
        super().__init__(message)
        self.plan = plan
        self.field = field  # of the request that holds several jobs


class Unavailable(StillhouseError):
    """A service that the request needs cannot be reached."""


class OldSchema(Unavailable):
    """The database has an older schema than this version needs; the message may be shown to anyone."""

    def __init__(self, found: str, needed: str) -> None:
        super().__init__(
            f"The database has schema version {found}, this server needs {needed}: run "
            "`python -m services.shared.jobs.db.migrations`, or restart `stillhouse up`."
        )


@contextmanager
def prefix_field(part: str | None) -> Iterator[None]:
    """Prefix the field of InvalidRequest and DoesNotFit with the part of the request, if there is one."""
    try:
        yield
    except (InvalidRequest, DoesNotFit) as error:
        if part is None:
            raise
        if isinstance(error, DoesNotFit):
            raise DoesNotFit(f"{part}: {error}", error.plan, field=part) from error
        field = part if error.field is None else f"{part}.{error.field}"
        problem = str(error).removeprefix(f"{error.field}: ")
        raise InvalidRequest(f"{field}: {problem}", field=field) from error
