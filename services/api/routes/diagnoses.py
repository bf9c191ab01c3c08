"""Diagnoses of out-of-memory errors, for jobs of this platform and of any other."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends

from services.api.auth.callers import requires
from services.api.auth.keys import Scope
from services.api.deps import CallerDep, ContextDep
from services.api.limits.body import screen_json
from services.api.openapi import problems
from services.shared.jobs.document_schema import Document
from services.shared.jobs.planning.calculations import answer_diagnosis, diagnosis_of
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnosis import DiagnosisDict

router = APIRouter(
    tags=["diagnoses"],
    dependencies=[Depends(requires(Scope.READ)), Depends(screen_json)],
    responses=problems(400, 401, 403, 413, 422, 429, 500, 503),
)

_FIELDS = ", ".join(field.name for field in fields(Case) if field.name != "ignored")
_EXAMPLE = {
    "log": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a "
    "total capacity of 63.98 GiB of which 112.00 MiB is free.",
    "model_name": "Qwen3-32B",
    "ranks": 8,
    "sharding_strategy": "FSDP1 full_shard",
    "optimizer": "adamw",
}
CaseBody = Annotated[
    dict[str, Any],
    Body(
        description=f"A description of the failed job; every field is optional: {_FIELDS}.",
        examples=[_EXAMPLE],
    ),
]


@router.post("/diagnoses", operation_id="diagnose")
def diagnose_case(
    case: CaseBody, caller: CallerDep, context: ContextDep
) -> Document[DiagnosisDict]:
    """Diagnose an out-of-memory error: its cause, the confidence in it, and remedies."""
    calculations = context.sandboxes.calculations
    return diagnosis_of(calculations.run(answer_diagnosis, case, caller=caller.id))
