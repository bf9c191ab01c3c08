"""Diagnoses a memory failure of our own ranks, and chooses the remedy that fits.

The case is filled from the job's spec, its recipe, and what its ranks recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import structlog

from services.shared.jobs.documents import JobPlanDict, RecipeFields
from services.shared.jobs.planning.auto_choices import num_ranks, settle_recipe
from services.shared.jobs.planning.model_shapes import Teacher, model_of, teacher_of
from services.shared.jobs.planning.spec_changes import split_changes
from services.shared.jobs.planning.spec_to_plan import (
    engine_of,
    frozen_teacher,
    machine_of,
    plan_job,
    to_memory_recipe,
    to_spec_changes,
)
from services.shared.jobs.run_directory import MemoryRecord, RunDirectory, read_records
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import (
    DistillSpec,
    Recipe,
    TeacherSpec,
    TrainedTokenizer,
)
from services.shared.jobs.views import Claim
from services.shared.launch.aftermath.outcome import MemoryFailure, RootCause
from services.shared.memory.architecture.shape import Shape
from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import DiagnosisDict, RemedyDict
from services.shared.memory.forensics.remedies.propose import fixed_by_smaller_recipe
from services.shared.memory.planning.alternatives import alternatives
from services.shared.memory.planning.frozen_teacher import FrozenTeacher, Placement
from services.shared.memory.planning.plan_contract import Verdict
from services.shared.memory.recipe import Engine
from services.shared.memory.recipe import Recipe as MemoryRecipe

log = structlog.get_logger(__name__)

_PRECISIONS = {
    "float32": "float32 throughout",
    "bfloat16": "bf16 mixed precision",
}
_PACKAGES = ("torch", "transformers", "accelerate")


@dataclass(frozen=True)
class _Job:
    """A job of known shape: the model it trains, the teacher of a distillation, and its recipe."""

    model: Shape
    teacher: Teacher | None
    frozen: FrozenTeacher | None  # the teacher as it was held on the ranks
    recipe: MemoryRecipe


def examine_memory(
    cause: RootCause, *, claim: Claim, run: RunDirectory, settings: JobSettings, exit_code: int
) -> MemoryFailure:
    """Diagnose the failure of one attempt and choose the first remedy that fits and can be run.

    A distillation's message is read without its shapes: two models were on the device, and an
    allocation may belong to either. Its remedies are those of its plan, which has both.
    """
    open_recipe = Recipe.model_validate(claim.recipe)  # of a preparation that ran out of memory
    recipe, _ = settle_recipe(open_recipe, device=claim.spec.resources.device, times=None)
    try:
        job = _known_job(claim, recipe, settings)
        facts = _facts(claim, recipe, job, settings)
        reported = _reported(cause, run=run, exit_code=exit_code)
        document = diagnose(Case.from_dict(facts | reported)).to_dict()
        if job is None:
            return MemoryFailure(diagnosis=document, recipe_changes={})
        remedies = list(_remedies(document, claim, job, settings))
    except InvalidInput as error:
        log.warning("no_diagnosis", job_id=claim.job_id, error=str(error))
        return MemoryFailure(diagnosis=None, recipe_changes={})
    fitting = [r["changes"] for r in remedies if r["changes"] and r["verdict"] is Verdict.FITS]
    placement, changes = split_changes(fitting[0]) if fitting else (None, {})
    return MemoryFailure(
        diagnosis={**document, "remedies": remedies},
        recipe_changes=changes,
        plan=_plan_with(placement, changes, claim, job, settings) if fitting else None,
    )


def _known_job(claim: Claim, recipe: Recipe, settings: JobSettings) -> _Job | None:
    """Return the job as the memory plan sees it; None for a model of unknown shape."""
    assert claim.resolved is not None
    teacher = None
    try:
        if isinstance(claim.spec, DistillSpec):
            teacher = teacher_of(claim.resolved)
        model = model_of(claim.resolved, teacher)
    except InvalidInput:
        return None  # the message can be read without a shape
    planned = to_memory_recipe(
        recipe,
        claim.spec.training,
        model=model,
        ranks=num_ranks(claim.spec.resources),
        engine=engine_of(settings),
    )
    return _Job(model, teacher, _frozen(teacher, claim, planned), planned)


def _frozen(teacher: Teacher | None, claim: Claim, planned: MemoryRecipe) -> FrozenTeacher | None:
    if teacher is None:
        return None
    assert isinstance(claim.spec, DistillSpec)
    planned_placement = claim.plan.get("teacher_placement") if claim.plan else None
    wanted = planned_placement or claim.spec.distillation.teacher_placement
    # Without a plan the ranks decide, and hold a small teacher whole.
    whole = teacher.unshardable or wanted != Placement.SHARDED
    placement = Placement.REPLICATED if whole else Placement.SHARDED
    return frozen_teacher(teacher, planned, placement)


def _facts(
    claim: Claim, recipe: Recipe, job: _Job | None, settings: JobSettings
) -> dict[str, object]:
    """Return what was known of the job before it started, as fields of a case."""
    assert claim.resolved is not None
    machine = machine_of(claim.spec, settings)
    planned = job.recipe if job is not None and job.teacher is None else None
    engine = Engine.DDP if recipe.sharding == "none" else engine_of(settings)
    facts: dict[str, object] = {
        "model": _config(claim) if planned else {},
        "heads": list(claim.resolved.num_classes),
        "ranks": machine.ranks,
        "device": machine.device.name,
        "device_memory_bytes": machine.device.memory_bytes,
        "host_memory_bytes": machine.host_memory_bytes,
        "framework": str(engine),
        "wrap_policy": f"{recipe.wrap} units",
        "precision": _PRECISIONS[recipe.compute],
        "accumulate": 1,  # every micro-batch's gradients are reduced: none stays whole
        "versions": _versions(),
    }
    for name in ("parameters", "optimizer", "optimizer_impl", "sharding", "offload"):
        facts[name] = str(getattr(recipe, name))
    for name in ("optimizer_in_backward", "activation_checkpointing"):
        facts[name] = getattr(recipe, name)
    if planned is not None:
        facts |= {
            "micro_batch": planned.micro_batch,
            "sequence_length": planned.sequence_length,
        }
    return facts


def _reported(cause: RootCause, *, run: RunDirectory, exit_code: int) -> dict[str, object]:
    """Return what the failed rank and its probe reported, as fields of a case."""
    reported: dict[str, object] = {"log": cause.log, "exit_code": exit_code}
    if cause.failure is not None:
        reported |= {"phase": cause.failure.phase, "step": cause.failure.step}
    ranks = run.ranks() if cause.rank is None else [cause.rank]
    for rank in ranks:
        for _, record in read_records(run.memory_file(rank), MemoryRecord):
            if record.observed is not None:
                seen = record.observed
                reported["observed"] = {
                    "sharded_units": seen.get("sharded_units"),
                    "local_parameter_bytes": seen.get("local_parameter_bytes"),
                    "expected_parameter_bytes": seen.get("expected_local_parameter_bytes"),
                    "allocated_after_wrap_bytes": record.allocated_bytes or None,
                    "dtypes": seen.get("parameter_dtypes"),
                }
                return reported
    return reported


def _remedies(
    diagnosis: DiagnosisDict, claim: Claim, job: _Job, settings: JobSettings
) -> Iterator[RemedyDict]:
    """Yield what to change: faults as the diagnosis names them, recipes as the job's own plan does.

    A case has less than a spec (gradient accumulation, sharding units), so its
    recipes are replaced by the plan's, whose `changes` are those that a retry takes.
    """
    proposed = diagnosis["remedies"]
    yield from (remedy for remedy in proposed if not remedy["changes"])
    machine = machine_of(claim.spec, settings)
    if not fixed_by_smaller_recipe(diagnosis["cause"], device=machine.device.name):
        return
    for offer in alternatives(job.model, job.recipe, machine, teacher=job.frozen):
        changes = to_spec_changes(offer.changes, job.recipe)
        if changes:
            yield {
                "change": offer.change,
                "predicted_peak_bytes": offer.plan.peak_bytes,
                "verdict": offer.plan.verdict,
                "costs": offer.costs,
                "changes": changes,
            }
    yield from (r for r in proposed if r["changes"] and r["verdict"] is Verdict.DOES_NOT_FIT)


def _plan_with(
    placement: str | None,
    changes: RecipeFields,
    claim: Claim,
    job: _Job,
    settings: JobSettings,
) -> JobPlanDict:
    """Return the plan of the job with a changed recipe, its teacher placed as before or as changed."""
    changed = Recipe.model_validate(claim.recipe | changes)
    spec = claim.spec.model_copy(update={"recipe": changed, "allow_overcommit": True})
    if isinstance(spec, DistillSpec):
        assert job.frozen is not None
        placed = {"teacher_placement": placement or str(job.frozen.placement)}
        spec = spec.model_copy(update={"distillation": spec.distillation.model_copy(update=placed)})
    return plan_job(
        spec,
        model=job.model,
        teacher=job.teacher,
        machine=machine_of(spec, settings),
        engine=engine_of(settings),
        training_texts=claim.resolved.training_texts if claim.resolved else 0,
    ).plan


def _config(claim: Claim) -> dict[str, object]:
    """Return the transformers config of a teacher job's model."""
    assert isinstance(claim.spec, TeacherSpec)
    source = claim.spec.model
    if source.config is None:
        assert claim.resolved is not None
        assert claim.resolved.model_dir is not None
        found: dict[str, object] = _read_json(claim.resolved.model_dir / "config.json")
        return found
    config = dict(source.config)
    if isinstance(source.tokenizer, TrainedTokenizer):
        config["vocab_size"] = source.tokenizer.vocab_size
    return config


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _versions() -> dict[str, str]:
    """Return the versions of what the ranks import, without importing it."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
