"""Choices that a spec leaves to the machine: made before the ranks start, and kept with the job.

The number format of a CPU is measured, and the rows that `trim_vocabulary` keeps are counted, by a process
of its own, since both need torch. The plan is then made again with what was found, and stored with the
job and its attempt: an attempt that resumes computes as the one before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import structlog

from services.shared.jobs.db.store import Store
from services.shared.jobs.documents import DecisionDict, JobPlanDict
from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.planning.auto_choices import (
    is_auto,
    num_ranks,
    ranks_decisions,
    read_times,
    settle_recipe,
    write_times,
)
from services.shared.jobs.planning.spec_to_plan import plan_resolved, size_of_layers
from services.shared.jobs.run_directory import (
    Prepared,
    RunDirectory,
    RunInput,
    read_record,
    write_json,
)
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import DistillSpec, Recipe, Resources
from services.shared.jobs.views import Claim
from services.shared.launch.devices import DeviceKind, device_kind
from services.shared.launch.heartbeat import Heartbeat
from services.shared.launch.supervise import RunExit, supervise
from services.shared.launch.torchrun import plan_preparation
from services.shared.memory.planning.plan_contract import Verdict
from services.shared.memory.planning.recipe_changes import TEACHER_PLACEMENT

log = structlog.get_logger(__name__)


def leaves_choices(claim: Claim) -> bool:
    """Return whether something is to be decided before the ranks of a claim start."""
    return (
        is_auto(Recipe.model_validate(claim.recipe))
        or claim.spec.resources.ranks == "auto"
        or _trims(claim)
    )


def settle(
    claim: Claim, *, run: RunDirectory, store: Store, stopping: Callable[[], bool]
) -> Claim | RunExit | None:
    """Return the claim with every choice made, not yet stored; the exit of a preparation that failed or
    was stopped. None where the lease was lost.
    """
    settings, found = store.settings, Prepared()
    recipe = Recipe.model_validate(claim.recipe)
    if _trims(claim) or _measures(claim, recipe, settings):
        ending = _prepare(claim, run=run, store=store, stopping=stopping)
        prepared = read_record(run.prepared, Prepared)
        if ending is None or ending.exit_code or ending.stop or prepared is None:
            return ending
        found = prepared
        if found.times is not None:
            write_times(settings.processors_dir, found.times)
    return _decide(claim, recipe, found, settings)


def _trims(claim: Claim) -> bool:
    assert claim.resolved is not None
    return claim.resolved.source.trim_vocabulary


def _measures(claim: Claim, recipe: Recipe, settings: JobSettings) -> bool:
    """Return whether the number format depends on a measurement that this processor does not have yet."""
    assert claim.resolved is not None
    if recipe.compute != "auto" or device_kind(claim.spec.resources.device) is not DeviceKind.CPU:
        return False
    return read_times(settings.processors_dir, size_of_layers(claim.resolved)) is None


def _prepare(
    claim: Claim, *, run: RunDirectory, store: Store, stopping: Callable[[], bool]
) -> RunExit | None:
    assert claim.resolved is not None
    settings, recipe = store.settings, Recipe.model_validate(claim.recipe)
    task = RunInput.model_validate_json(run.spec.read_bytes())
    if _measures(claim, recipe, settings):
        task = task.model_copy(update={"measure": size_of_layers(claim.resolved)})
    write_json(run.spec, task)
    heartbeat = Heartbeat(store, claim, run=run, lease_seconds=settings.lease_seconds)
    return supervise(
        plan_preparation(run.path, resources=claim.spec.resources, environment=os.environ),
        run=run,
        beat=heartbeat.beat,
        stopping=stopping,
        settings=settings,
        timeout_seconds=claim.spec.timeout_seconds,
    )


def _decide(claim: Claim, recipe: Recipe, found: Prepared, settings: JobSettings) -> Claim:
    """Return the claim with concrete ranks, recipe and vocabulary, and with the plan of these."""
    assert claim.resolved is not None
    given = claim.spec.resources
    times = found.times or read_times(settings.processors_dir, size_of_layers(claim.resolved))
    settled, decisions = settle_recipe(recipe, device=given.device, times=times)
    resources = Resources.model_validate(given.model_dump() | {"ranks": num_ranks(given)})
    spec = claim.spec.model_copy(update={"resources": resources})
    resolved = replace(claim.resolved, spec=spec, vocabulary_rows=found.vocabulary_rows)
    decisions += [*ranks_decisions(given), *_vocabulary_decisions(claim, found)]
    decided = replace(
        claim,
        spec=spec,
        resolved=resolved,
        recipe=settled.model_dump(mode="json"),
    )
    log.info("settled", job_id=claim.job_id, attempt=claim.attempt, decisions=decisions)
    return replace(decided, plan=_plan_again(decided, settled, decisions, settings))


def _plan_again(
    claim: Claim, recipe: Recipe, decisions: list[DecisionDict], settings: JobSettings
) -> JobPlanDict | None:
    """Return the plan of a claim whose choices are made; None for a model that has none."""
    assert claim.resolved is not None
    if claim.plan is None:
        return None
    changes: dict[str, object] = {"recipe": recipe, "allow_overcommit": True}
    placement = claim.plan.get(TEACHER_PLACEMENT)
    if isinstance(claim.spec, DistillSpec) and placement is not None:
        update = {TEACHER_PLACEMENT: placement}
        changes["distillation"] = claim.spec.distillation.model_copy(update=update)
    spec = claim.spec.model_copy(update=changes)
    try:
        plan = plan_resolved(replace(claim.resolved, spec=spec), settings).plan
    except InvalidRequest as error:
        log.warning("not_planned_again", job_id=claim.job_id, error=str(error))
        plan = claim.plan
    if plan is None:
        return None
    if Verdict.DOES_NOT_FIT in (plan["verdict"], plan["host_verdict"]):
        log.warning("settled_plan_does_not_fit", job_id=claim.job_id, peak=plan["peak_bytes"])
    new = {decision["field"] for decision in decisions}
    kept = [d for d in claim.plan.get("decisions", []) if d["field"] not in new]
    if kept or decisions:
        plan["decisions"] = [*kept, *decisions]
    return plan


def _vocabulary_decisions(claim: Claim, found: Prepared) -> list[DecisionDict]:
    if found.vocabulary_rows is None:
        return []
    part = "student" if isinstance(claim.spec, DistillSpec) else "model"
    why = (
        f"of {found.vocabulary_rows_before:,} rows, those that the texts use and the pieces to fall back "
        "to were counted"
    )
    field, rows = f"{part}.trim_vocabulary", found.vocabulary_rows
    return [{"field": field, "value": rows, "basis": "measured", "why": why}]
