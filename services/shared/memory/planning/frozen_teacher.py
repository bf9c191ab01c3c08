"""The teacher of a distillation: frozen, it only runs forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.recipe import (
    Engine,
    Loading,
    Offload,
    Optimizer,
    Recipe,
    Sharding,
    Wrap,
)


class Placement(str, Enum):
    """How a teacher is placed on the ranks of its student."""

    SHARDED = "sharded"
    REPLICATED = "replicated"

    __str__ = str.__str__


@dataclass(frozen=True)
class FrozenTeacher:
    """A teacher that only runs forward while its student trains.

    `attention_mask` says whether its attention gets an explicit mask (None: as the student's),
    `unshardable` that the ranks cannot shard it.
    """

    shape: Shape
    placement: Placement = Placement.SHARDED
    attention_mask: bool | None = None
    unshardable: bool = False


def inference_recipe(student_recipe: Recipe, teacher: FrozenTeacher) -> Recipe:
    """Return the recipe of a teacher's forward pass: sharded like the student, or replicated."""
    whole = teacher.placement is Placement.REPLICATED
    return replace(
        student_recipe,
        engine=Engine.DDP if whole else student_recipe.engine,
        sharding=Sharding.NONE if whole else Sharding.FULL,
        shard_ranks=None,
        wrap=Wrap.LAYER,
        parameters=student_recipe.compute,
        reduce=student_recipe.compute,
        optimizer=Optimizer.ADAMW,
        activation_checkpointing=False,
        optimizer_in_backward=False,
        accumulate=1,
        offload=Offload.NONE,
        loading=Loading.EVERY_RANK if whole else student_recipe.loading,
        upcast_after_wrap=False,
        attention_mask=(
            student_recipe.attention_mask
            if teacher.attention_mask is None
            else teacher.attention_mask
        ),
    )
