"""Plans and diagnoses as functions of plain data, which the API calls in a sandbox.

Both calculate with what a user sends, a log of megabytes or a config of any numbers, and read the
headers of files that a user names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from services.shared.jobs.documents import JobPlanDict
from services.shared.jobs.errors import DoesNotFit, InvalidRequest
from services.shared.jobs.planning.spec_to_plan import plan_resolved
from services.shared.jobs.resolved_spec import PlannedSpec, ResolvedSpec, Unplanned
from services.shared.jobs.spec import Recipe
from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import DiagnosisDict


@dataclass(frozen=True)
class PlanRequest:
    """A job, and what the server's settings say of its machine (`MachineSettings`)."""

    resolved: ResolvedSpec
    host_memory: str | None
    engine: Literal["fsdp1", "fsdp2"] | None
    processors_dir: Path


@dataclass(frozen=True)
class PlanAnswer:
    """What `plan_resolved` returned or raised."""

    plan: dict[str, Any] | None = None
    recipe: Recipe | None = None
    unplanned: Unplanned | None = None
    does_not_fit: str | None = None  # the message of DoesNotFit
    invalid: str | None = None  # the message of InvalidRequest
    field: str | None = None


@dataclass(frozen=True)
class DiagnosisAnswer:
    """A diagnosis, or the InvalidInput that was raised."""

    diagnosis: dict[str, Any] | None = None
    field: str = ""
    problem: str = ""
    accepted: str = ""


def answer_plan(request: PlanRequest) -> PlanAnswer:
    """Plan a job."""
    try:
        planned = plan_resolved(request.resolved, request)
    except DoesNotFit as error:
        return PlanAnswer(plan=cast("dict[str, Any]", error.plan), does_not_fit=str(error))
    except InvalidRequest as error:
        return PlanAnswer(invalid=str(error), field=error.field)
    return PlanAnswer(
        plan=cast("dict[str, Any] | None", planned.plan),
        recipe=planned.recipe,
        unplanned=planned.unplanned,
    )


def planned_spec(resolved: ResolvedSpec, answer: PlanAnswer) -> PlannedSpec:
    """Return what `plan_resolved` returned. Raises what it raised: DoesNotFit, InvalidRequest."""
    plan = cast("JobPlanDict | None", answer.plan)
    if answer.invalid is not None:
        raise InvalidRequest(answer.invalid, field=answer.field)
    if answer.does_not_fit is not None:
        assert plan is not None
        raise DoesNotFit(answer.does_not_fit, plan)
    return PlannedSpec(resolved, plan=plan, recipe=answer.recipe, unplanned=answer.unplanned)


def answer_diagnosis(case: dict[str, Any]) -> DiagnosisAnswer:
    """Diagnose a case."""
    try:
        found = diagnose(Case.from_dict(case)).to_dict()
    except InvalidInput as error:
        return DiagnosisAnswer(field=error.field, problem=error.problem, accepted=error.accepted)
    return DiagnosisAnswer(diagnosis=cast("dict[str, Any]", found))


def diagnosis_of(answer: DiagnosisAnswer) -> DiagnosisDict:
    """Return the diagnosis. Raises InvalidInput where the case was invalid."""
    if answer.diagnosis is None:
        raise InvalidInput(answer.field, answer.problem, accepted=answer.accepted)
    return cast("DiagnosisDict", answer.diagnosis)
