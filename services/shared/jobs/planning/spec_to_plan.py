"""Converts a job's spec to its memory plan: the one place where `jobs.spec` meets `memory`.

The plan is made for the largest micro-batch that the job may meet: texts of `training.max_length`
tokens, as many as the token budget holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal, Protocol, cast

import structlog
from pydantic import BaseModel, ValidationError

from services.shared.jobs.documents import JobPlanDict, RecipeFields
from services.shared.jobs.errors import DoesNotFit, InvalidRequest
from services.shared.jobs.planning.auto_choices import (
    num_ranks,
    ranks_decisions,
    read_times,
    settle_recipe,
    source_decisions,
)
from services.shared.jobs.planning.model_shapes import ENCODERS, Teacher, model_of, teacher_of
from services.shared.jobs.planning.spec_changes import split_changes
from services.shared.jobs.resolved_spec import PlannedSpec, ResolvedSpec, Unplanned
from services.shared.jobs.run_directory import LayerSize, MatmulTimes
from services.shared.jobs.spec import DistillSpec, Recipe, TeacherSpec, Training
from services.shared.memory import hardware, recipe
from services.shared.memory.architecture import shape
from services.shared.memory.cgroup import host_memory_bytes
from services.shared.memory.errors import InvalidInput
from services.shared.memory.planning import alternatives
from services.shared.memory.planning.frozen_teacher import FrozenTeacher, Placement
from services.shared.memory.planning.layers import check_planned
from services.shared.memory.planning.plan import Plan, plan
from services.shared.memory.planning.plan_contract import Changes, Verdict
from services.shared.memory.planning.recipe_changes import TEACHER_PLACEMENT
from services.shared.memory.sizes import format_size, parse_size

log = structlog.get_logger(__name__)

# The fields that both recipes have, under one name and with the same values.
_SHARED = tuple(name for name in Recipe.model_fields if name in recipe.Recipe.__dataclass_fields__)


class MachineSettings(Protocol):
    """What a plan reads of `JobSettings`."""

    @property
    def host_memory(self) -> str | None: ...
    @property
    def engine(self) -> Literal["fsdp1", "fsdp2"] | None: ...
    @property
    def processors_dir(self) -> Path: ...


@dataclass(frozen=True)
class JobPlan:
    """The plan of one job, and the recipe it will run with: `auto` is resolved here."""

    plan: JobPlanDict
    recipe: Recipe


def plan_resolved(resolved: ResolvedSpec, settings: MachineSettings) -> PlannedSpec:
    """Plan a job with what this server knows of its models and its machine.

    A model of unknown shape, or one whose activations have not been worked out, is not an error: it
    may train all the same, without a plan. Raises DoesNotFit with the plan, InvalidRequest naming the
    field.
    """
    teacher, part = None, "model"
    try:
        if isinstance(resolved.spec, DistillSpec):
            part = "teacher"
            teacher = teacher_of(resolved)
            check_planned(teacher.shape.dims)
            part = "student"
        model = model_of(resolved, teacher)
        check_planned(model.dims)
    except InvalidInput as error:
        log.info("job_not_planned", part=part, why=str(error))
        unplanned = Unplanned(_source_field(resolved, part), str(error))
        return PlannedSpec(resolved, unplanned=unplanned)
    try:
        planned = plan_job(
            resolved.spec,
            model=model,
            teacher=teacher,
            machine=machine_of(resolved.spec, settings),
            engine=engine_of(settings),
            times=read_times(settings.processors_dir, layer_size(model)),
            training_texts=resolved.training_texts,
        )
    except InvalidInput as error:
        raise InvalidRequest(str(error), field=_spec_field(error.field)) from error
    decisions = source_decisions(
        resolved,
        vocab_size=model.dims.vocab_size,
        teacher_layers=None if teacher is None else teacher.shape.dims.num_layers,
    )
    if decisions:
        planned.plan["decisions"] = [*planned.plan.get("decisions", []), *decisions]
    return PlannedSpec(resolved, plan=planned.plan, recipe=planned.recipe)


def plan_job(
    spec: TeacherSpec | DistillSpec,
    *,
    model: shape.Shape,
    teacher: Teacher | None,
    machine: hardware.Hardware,
    engine: recipe.Engine,
    times: MatmulTimes | None = None,
    training_texts: int = 0,
) -> JobPlan:
    """Plan a job and choose its recipe. Raises DoesNotFit, with the plan and what would fit.

    A number format left to the processor is planned by `times`, or as assumed; it stays `auto` in the
    recipe until a worker decides it.

    `model` is trained; `teacher` is the frozen model of a distillation. With `recipe: auto` an
    alternative is taken where the defaults do not fit well; with `teacher_placement: auto` the
    teacher is replicated on every rank where that fits well; with `allow_overcommit` nothing is
    refused. Raises InvalidInput for what cannot be planned.
    """
    wanted = spec.recipe if isinstance(spec.recipe, Recipe) else Recipe()
    settled, decisions = settle_recipe(wanted, device=spec.resources.device, times=times)
    memory_recipe = to_memory_recipe(
        settled, spec.training, model=model, ranks=machine.ranks, engine=engine
    ).with_changes({"training_texts": training_texts})
    own, frozen = _plan(spec, model, teacher, memory_recipe, machine)
    offered = alternatives.alternatives(model, memory_recipe, machine, teacher=frozen)
    chosen, chosen_recipe = own, wanted if decisions else settled
    placement = None if frozen is None else frozen.placement
    alternative = _choose(spec, own, offered, memory_recipe) if spec.recipe == "auto" else None
    if alternative is not None:
        chosen = alternative.plan
        changes = to_spec_changes(alternative.changes, memory_recipe)
        assert changes is not None
        moved, changes = split_changes(changes)
        placement = placement if moved is None else Placement(moved)
        chosen_recipe = Recipe.model_validate(chosen_recipe.model_dump() | changes)
    document = cast("JobPlanDict", chosen.to_dict([a.to_dict() for a in offered]))
    if placement is not None:
        document["teacher_placement"] = str(placement)  # the ranks do as planned
    if decisions := [*decisions, *ranks_decisions(spec.resources)]:
        document["decisions"] = decisions
    if not chosen.runs and not spec.allow_overcommit:
        raise DoesNotFit(_refusal(chosen, offered), document)
    return JobPlan(document, chosen_recipe)


def to_memory_recipe(
    wanted: Recipe,
    training: Training,
    *,
    model: shape.Shape,
    ranks: int,
    engine: recipe.Engine,
) -> recipe.Recipe:
    """Return how the ranks will run a spec's recipe, as a recipe of the memory plan."""
    tokens = wanted.token_budget(training)
    micro_batch = max(1, tokens // training.max_length)
    texts_a_rank = -(-training.batch_size // ranks)
    micro_batch = min(micro_batch, texts_a_rank)
    requested = recipe.Recipe().with_changes(
        {name: getattr(wanted, name) for name in _SHARED}
        | {
            # Replicas are units over groups of one rank, not DDP: see training/sharding/shard.py.
            "engine": engine,
            "micro_batch": micro_batch,
            "sequence_length": training.max_length,
            "accumulate": -(-texts_a_rank // micro_batch),
        }
    )
    return as_run_by_ranks(requested, model)


def as_run_by_ranks(
    wanted: recipe.Recipe, model: shape.Shape, *, padded: bool = True, on_cpu: bool = False
) -> recipe.Recipe:
    """Return a recipe of the memory plan with the settings that our ranks always use.

    With `padded`, texts of a micro-batch differ in length, so that an encoder needs a mask;
    eager attention makes one for decoders anyway.
    """
    fsdp2 = wanted.engine is recipe.Engine.FSDP2
    # The ranks prefetch in backward under FSDP1, but on a CPU; FSDP2 always does.
    prefetches = not fsdp2 and not on_cpu and wanted.sharding is not recipe.Sharding.NONE
    eager = wanted.attention is recipe.Attention.EAGER
    masked = padded if model.dims.family in ENCODERS else eager
    return wanted.with_changes(
        {
            "reshard_root": fsdp2,
            "prefetch": "pre" if prefetches else "none",
            "attention_mask": masked,
            "reduce_each": True,
            "loading": "sliced",
            "upcast_after_wrap": False,
            "data_workers": 0,
        }
    )


def frozen_teacher(teacher: Teacher, student: recipe.Recipe, placement: Placement) -> FrozenTeacher:
    """Return a teacher as it is held on the ranks of a student that runs with a recipe."""
    masked = as_run_by_ranks(student, teacher.shape).attention_mask
    return FrozenTeacher(
        teacher.shape, placement, attention_mask=masked, unshardable=teacher.unshardable
    )


def to_spec_recipe(wanted: recipe.Recipe) -> Recipe:
    """Return a recipe of the memory plan as a spec's, which has neither engine nor micro-batches.

    Raises InvalidRequest for what our ranks cannot do.
    """
    values = {name: value for name, value in wanted.to_dict().items() if name in _SHARED}
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        raise InvalidInput(
            field, f"the ranks have no {values[field]}", accepted=first["ctx"]["expected"]
        ) from error


def to_spec_changes(changes: Changes, base: recipe.Recipe) -> RecipeFields | None:
    """Return an alternative's changes as a retry takes them, or None where ranks cannot do it.

    Those are fields of `spec.Recipe`, and `teacher_placement`.
    """
    found: RecipeFields = {}
    for name, value in changes.items():
        if name == "micro_batch":
            found["micro_batch_tokens"] = value * base.sequence_length
        elif name in _SHARED or name == TEACHER_PLACEMENT:
            found[name] = value
        elif name != "accumulate":  # follows from the micro-batch and the global batch
            return None
    return found


def machine_of(spec: TeacherSpec | DistillSpec, settings: MachineSettings) -> hardware.Hardware:
    """Return the hardware that a spec declares. Raises InvalidInput."""
    resources, ranks = spec.resources, num_ranks(spec.resources)
    named = resources.host_memory or settings.host_memory
    host = parse_size(named, field="host_memory") if named else host_memory_bytes()
    device = (
        parse_size(resources.device_memory, field="device_memory")
        if resources.device_memory
        else None
    )
    if hardware.find_device(resources.device).name == "cpu":
        # On a CPU the ranks share the host, which is their device.
        if device is None and host is not None:
            device = host // ranks
        host = None
    elif not named:
        host = None  # this process may run on another machine than the workers
    return hardware.machine(
        resources.device,
        ranks=ranks,
        device_memory_bytes=device,
        host_memory_bytes=host,
    )


def layer_size(model: shape.Shape) -> LayerSize:
    """Return the size by which the processor's speed for this model is measured."""
    return LayerSize(hidden=model.dims.hidden_size, intermediate=model.dims.intermediate_size)


def size_of_layers(resolved: ResolvedSpec) -> LayerSize:
    """Return the layer size of the model that a job trains; a usual one where it is not known."""
    try:
        teacher = teacher_of(resolved) if isinstance(resolved.spec, DistillSpec) else None
        return layer_size(model_of(resolved, teacher))
    except (InvalidInput, InvalidRequest):
        return LayerSize()


def engine_of(settings: MachineSettings) -> recipe.Engine:
    """Return what shards on the ranks: as set, or as the torch that is installed here would."""
    if settings.engine is not None:
        return recipe.Engine(settings.engine)
    try:
        return recipe.Engine.of_torch(metadata.version("torch"))
    except (metadata.PackageNotFoundError, ValueError):
        return recipe.Engine.FSDP2


def _plan(
    spec: TeacherSpec | DistillSpec,
    model: shape.Shape,
    teacher: Teacher | None,
    memory_recipe: recipe.Recipe,
    machine: hardware.Hardware,
) -> tuple[Plan, FrozenTeacher | None]:
    """Return the plan, and its teacher: replicated on every rank only where that fits well."""
    if teacher is None:
        return plan(model, memory_recipe, machine), None
    assert isinstance(spec, DistillSpec)
    wanted = spec.distillation.teacher_placement
    if wanted == "sharded" and teacher.unshardable:
        raise InvalidInput(
            TEACHER_PLACEMENT,
            "an encoder classifier made elsewhere cannot be sharded",
            accepted=("replicated", "auto"),
        )
    whole = frozen_teacher(teacher, memory_recipe, Placement.REPLICATED)
    if wanted != "sharded" or teacher.unshardable:
        planned = plan(model, memory_recipe, machine, teacher=whole)
        comfortable = planned.runs and planned.verdict is Verdict.FITS
        if wanted == "replicated" or teacher.unshardable or comfortable:
            return planned, whole
    sharded = replace(whole, placement=Placement.SHARDED)
    return plan(model, memory_recipe, machine, teacher=sharded), sharded


def _choose(
    spec: TeacherSpec | DistillSpec,
    own: Plan,
    offered: Sequence[alternatives.Alternative],
    memory_recipe: recipe.Recipe,
) -> alternatives.Alternative | None:
    """Return what `recipe: auto` changes: what fits well and computes the same, else what fits at all.

    A placement that the spec names is not changed.
    """
    if own.runs and own.verdict is Verdict.FITS:
        return None
    named = isinstance(spec, DistillSpec) and spec.distillation.teacher_placement != "auto"
    possible = [
        alternative
        for alternative in offered
        if to_spec_changes(alternative.changes, memory_recipe) is not None
        and not (named and TEACHER_PLACEMENT in alternative.changes)
    ]
    for alternative in possible:
        if alternative.lossless and alternative.plan.verdict is Verdict.FITS:
            return alternative
    return None if own.runs or not possible else possible[0]


def _refusal(refused: Plan, offered: Sequence[alternatives.Alternative]) -> str:
    where = f"{refused.peak_phase} of step {refused.peak.step}"
    if refused.verdict is Verdict.DOES_NOT_FIT:
        reason = (
            f"The job needs {format_size(refused.peak_bytes)} on each rank ({where}), "
            f"{format_size(-refused.headroom_bytes)} more than a "
            f"{refused.hardware.device.name} gives to tensors "
            f"({format_size(refused.budget_bytes)})."
        )
    else:
        assert refused.hardware.host_memory_bytes is not None
        reason = (
            f"The job needs {format_size(refused.host.peak_bytes)} of host memory, which has "
            f"{format_size(refused.hardware.host_memory_bytes)}."
        )
    if not offered:
        return f"{reason} No known change would make it fit."
    first = offered[0]
    return f"{reason} It fits with: {first.change} ({format_size(first.plan.peak_bytes)})."


def _source_field(resolved: ResolvedSpec, part: str) -> str:
    """Return where a spec names the model of a part, as `student.config`."""
    source: BaseModel = resolved.source
    if part == "teacher":
        assert isinstance(resolved.spec, DistillSpec)
        source = resolved.spec.teacher
    given = source.model_dump(exclude_none=True, exclude={"tokenizer"})
    return f"{part}.{next(iter(given))}"


def _spec_field(field: str) -> str:
    """Return the field of a spec that a field of the memory plan comes from."""
    if field in ("ranks", "device", "device_memory", "host_memory"):
        return f"resources.{field}"
    if field == TEACHER_PLACEMENT:
        return f"distillation.{field}"
    return f"recipe.{field}" if not field.startswith("model") else field
