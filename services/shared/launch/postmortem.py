"""From a memory failure of our own ranks to a diagnosis, and to the remedy that fits.

Nothing has to be guessed about a job of ours: the case is filled from its spec, its recipe, and what
its ranks recorded.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import structlog

from services.shared.datasets.card import DatasetCard
from services.shared.jobs.planning import (
    engine_of,
    machine_of,
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
from services.shared.memory.diagnosis import Diagnosis
from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics import diagnose
from services.shared.memory.recipe import Engine
from services.shared.memory.recipe import Recipe as MemoryRecipe

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
        diagnosis = diagnose(Case.from_json(facts | told))
    except InvalidInput as error:
        log.warning("no_diagnosis", job_id=claim.job_id, error=str(error))
        return PostMortem(diagnosis=None, recipe_changes={})
    changes = _fitting_changes(diagnosis, recipe, planned) if planned else {}
    return PostMortem(diagnosis=diagnosis.to_json(), recipe_changes=changes)


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


def _fitting_changes(diagnosis: Diagnosis, recipe: Recipe, planned: MemoryRecipe) -> dict[str, Any]:
    """Return the recipe fields of the first remedy that fits and that the ranks can run."""
    now = recipe.model_dump(mode="json")
    for remedy in diagnosis.remedies:
        if remedy.verdict != "fits" or not remedy.changes:
            continue
        changes = to_spec_changes(remedy.changes, planned)
        if changes and any(now.get(name) != value for name, value in changes.items()):
            return changes
    return {}


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
