"""From a memory failure of our own ranks to a diagnosis, and to the remedy that fits.

Nothing has to be guessed about a job of ours: the case is filled from its spec, its recipe, and what
its ranks recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import structlog

from services.shared.datasets.card import DatasetCard
from services.shared.jobs.planning import (
    engine_of,
    machine_of,
    plan_job,
    shape_of,
    to_memory_recipe,
    to_spec_changes,
)
from services.shared.jobs.rundir import MemoryRecord, RunDirectory, read_records
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import Precision, Recipe, TeacherSpec, TrainedTokenizer
from services.shared.jobs.views import Claim
from services.shared.launch.verdict import Blame, PostMortem
from services.shared.memory.case import Case
from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics import diagnose
from services.shared.memory.recipe import Engine
from services.shared.memory.recipe import Recipe as MemoryRecipe
from services.shared.memory.remedies import alternatives

log = structlog.get_logger(__name__)

_PRECISIONS = {
    Precision.FLOAT32: "float32 throughout",
    Precision.BFLOAT16: "bf16 mixed precision",
}
_PACKAGES = ("torch", "transformers", "accelerate")


def examine_memory(
    blame: Blame, *, claim: Claim, run: RunDirectory, settings: JobSettings, exit_code: int
) -> PostMortem:
    """Diagnose the failure of one attempt and choose the first remedy that fits and can be run."""
    recipe = Recipe.model_validate(claim.recipe)
    try:
        planned = _memory_recipe(claim, recipe, settings)
        facts = _facts(claim, recipe, planned, settings)
        told = _told(blame, run=run, exit_code=exit_code)
        document = diagnose(Case.from_json(facts | told)).to_json()
        if planned is None:
            return PostMortem(diagnosis=document, recipe_changes={})
        remedies = list(_remedies(document["remedies"], claim, planned, settings))
    except InvalidInput as error:
        log.warning("no_diagnosis", job_id=claim.job_id, error=str(error))
        return PostMortem(diagnosis=None, recipe_changes={})
    fitting = [r["changes"] for r in remedies if r["changes"] and r["verdict"] == "fits"]
    changes: dict[str, Any] = fitting[0] if fitting else {}
    return PostMortem(
        diagnosis=document | {"remedies": remedies},
        recipe_changes=changes,
        plan=_plan_with(changes, claim, recipe, settings) if changes else None,
    )


def _memory_recipe(claim: Claim, recipe: Recipe, settings: JobSettings) -> MemoryRecipe | None:
    """Return the recipe in the memory plan's words; None where the plan's arithmetic does not hold.

    That is a model of unknown shape, and a distillation, whose teacher lies beside the student.
    """
    if not isinstance(claim.spec, TeacherSpec):
        return None
    try:
        shape = shape_of(claim.spec.model, directory=claim.model_dir, classes=_classes(claim))
    except InvalidInput:
        return None  # the message can be read without a shape
    return to_memory_recipe(
        recipe,
        claim.spec.training,
        model=shape,
        ranks=claim.spec.resources.ranks,
        engine=engine_of(settings),
    )


def _facts(
    claim: Claim, recipe: Recipe, planned: MemoryRecipe | None, settings: JobSettings
) -> dict[str, Any]:
    """Return what was known of the job before it started, as fields of a case."""
    machine = machine_of(claim.spec, settings)
    engine = Engine.DDP if recipe.sharding == "none" else engine_of(settings)
    facts: dict[str, Any] = {
        "model": _config(claim) if planned else {},
        "heads": list(_classes(claim)),
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


def _told(blame: Blame, *, run: RunDirectory, exit_code: int) -> dict[str, Any]:
    """Return what the failed rank and its probe said, as fields of a case."""
    told: dict[str, Any] = {"log": blame.log, "exit_code": exit_code}
    if blame.failure is not None:
        told |= {"phase": blame.failure.phase, "step": blame.failure.step}
    ranks = run.ranks() if blame.rank is None else [blame.rank]
    for rank in ranks:
        for _, record in read_records(run.memory_file(rank), MemoryRecord):
            if record.observed is not None:
                seen = record.observed
                told["observed"] = {
                    "sharded_units": seen.get("sharded_units"),
                    "local_parameter_bytes": seen.get("local_parameter_bytes"),
                    "expected_parameter_bytes": seen.get("expected_local_parameter_bytes"),
                    "allocated_after_wrap_bytes": record.allocated_bytes or None,
                    "dtypes": seen.get("parameter_dtypes"),
                }
                return told
    return told


def _remedies(
    proposed: list[dict[str, Any]], claim: Claim, planned: MemoryRecipe, settings: JobSettings
) -> Iterator[dict[str, Any]]:
    """Yield what to change: faults as the diagnosis names them, recipes as the job's own plan does.

    A case says less than a spec (how often gradients accumulate, which units there are), so its
    recipes are replaced by the plan's, whose `changes` are those that a retry takes.
    """
    faults = [remedy for remedy in proposed if not remedy["changes"]]
    yield from faults
    if len(faults) == len(proposed):  # no smaller recipe would help
        return
    assert isinstance(claim.spec, TeacherSpec)
    shape = shape_of(claim.spec.model, directory=claim.model_dir, classes=_classes(claim))
    for offer in alternatives(shape, planned, machine_of(claim.spec, settings)):
        changes = to_spec_changes(offer.changes, planned)
        if changes:
            yield {
                "change": offer.change,
                "predicted_peak_bytes": offer.plan.peak_bytes,
                "verdict": str(offer.plan.verdict),
                "costs": offer.costs,
                "changes": changes,
            }
    yield from (r for r in proposed if r["changes"] and r["verdict"] == "does_not_fit")


def _plan_with(
    changes: dict[str, Any], claim: Claim, recipe: Recipe, settings: JobSettings
) -> dict[str, Any]:
    """Return the plan of the job with a changed recipe."""
    assert isinstance(claim.spec, TeacherSpec)
    changed = Recipe.model_validate(recipe.model_dump(mode="json") | changes)
    spec = claim.spec.model_copy(update={"recipe": changed, "allow_overcommit": True})
    return plan_job(
        spec,
        model=shape_of(spec.model, directory=claim.model_dir, classes=_classes(claim)),
        teacher=None,
        machine=machine_of(spec, settings),
        engine=engine_of(settings),
    ).plan


def _config(claim: Claim) -> dict[str, Any]:
    """Return the transformers config of a teacher job's model."""
    assert isinstance(claim.spec, TeacherSpec)
    source = claim.spec.model
    if source.config is None:
        assert claim.model_dir is not None
        found: dict[str, Any] = _read_json(claim.model_dir / "config.json")
        return found
    config = dict(source.config)
    if isinstance(source.tokenizer, TrainedTokenizer):
        config["vocab_size"] = source.tokenizer.vocab_size
    return config


def _classes(claim: Claim) -> tuple[int, ...]:
    card = DatasetCard.model_validate(_read_json(claim.dataset_dir / "dataset.json"))
    chosen = claim.spec.heads
    return tuple(len(h.labels) for h in card.heads if chosen is None or h.name in chosen)


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
