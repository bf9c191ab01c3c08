"""What can go wrong with a job, apart from the job itself failing.

    StillhouseError
    ├── NotFound            no such dataset, job, model
    ├── InvalidInput        the request contradicts itself or what is stored
    ├── Conflict            the thing is not in the state that the request needs
    │   ├── InvalidTransition
    │   └── GateNotPassed
    ├── DoesNotFit          the memory plan refuses the job
    └── Unavailable         the database or the broker cannot be reached

An expected end of a run is a value (`launch.verdict`), never an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.shared.jobs.documents import JobPlanDict


class StillhouseError(Exception):
    """The root of the tree."""


class NotFound(StillhouseError):
    """No such thing."""

    def __init__(self, what: str, id: str) -> None:
        super().__init__(f"There is no {what} {id!r}.")
        self.what = what
        self.id = id


class InvalidInput(StillhouseError):
    """A well-formed request that cannot be carried out as it stands."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Conflict(StillhouseError):
    """The thing exists but is not in the state that the request needs."""


class InvalidTransition(Conflict):
    """A job was asked to move where the transition table has no arrow."""

    def __init__(self, job_id: str, state: str, target: str) -> None:
        super().__init__(f"Job {job_id} is {state}; it cannot become {target}.")
        self.job_id = job_id
        self.state = state
        self.target = target


class GateNotPassed(Conflict):
    """A student lost too much of its teacher to be promoted without force."""

    def __init__(self, model_id: str, message: str) -> None:
        super().__init__(message)
        self.model_id = model_id


class DoesNotFit(StillhouseError):
    """The plan says that the job would run out of memory."""

    def __init__(self, message: str, plan: JobPlanDict, *, field: str | None = None) -> None:
        super().__init__(message)
        self.plan = plan
        self.field = field  # of the request that holds several jobs


class Unavailable(StillhouseError):
    """A part that the request needs cannot be reached now."""


@contextmanager
def prefix_field(part: str | None) -> Iterator[None]:
    """Let InvalidInput and DoesNotFit name the part of a request that they are about, if any."""
    try:
        yield
    except (InvalidInput, DoesNotFit) as error:
        if part is None:
            raise
        if isinstance(error, DoesNotFit):
            raise DoesNotFit(f"{part}: {error}", error.plan, field=part) from error
        field = part if error.field is None else f"{part}.{error.field}"
        said = str(error).removeprefix(f"{error.field}: ")
        raise InvalidInput(f"{field}: {said}", field=field) from error
