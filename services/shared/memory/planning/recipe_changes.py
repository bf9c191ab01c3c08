"""The catalogue of changes that lower a job's memory, the least loss of fidelity first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.shared.memory.hardware import Hardware
from services.shared.memory.planning.frozen_teacher import FrozenTeacher, Placement
from services.shared.memory.planning.plan import max_shard_ranks
from services.shared.memory.planning.plan_contract import Changes
from services.shared.memory.recipe import (
    Attention,
    Embedding,
    Engine,
    Offload,
    Optimizer,
    OptimizerImpl,
    Precision,
    Prefetch,
    Recipe,
    Sharding,
    Wrap,
)

# The one change outside of the student's recipe: how the teacher is placed on the ranks.
TEACHER_PLACEMENT = "teacher_placement"


@dataclass(frozen=True)
class RecipeChange:
    """One change of a recipe, its description, and what it costs."""

    changes: Changes
    change: str
    costs: str
    lossless: bool = True


def teacher_changes(teacher: FrozenTeacher | None, hardware: Hardware) -> Iterator[RecipeChange]:
    """Yield the changes of the teacher alone."""
    if teacher is None or teacher.placement is Placement.SHARDED or hardware.ranks == 1:
        return
    if not teacher.unshardable and hardware.ranks <= max_shard_ranks(teacher.shape):
        yield RecipeChange(
            {TEACHER_PLACEMENT: Placement.SHARDED},
            "shard the teacher over all ranks",
            "its layers are gathered for every batch that it answers",
        )


def lossless_changes(recipe: Recipe) -> Iterator[RecipeChange]:
    """Yield changes that leave every computed number as it is, the cheapest in time first."""
    yield from _sharding(recipe)
    if not recipe.activation_checkpointing:
        yield RecipeChange(
            {"activation_checkpointing": True},
            "recompute activations (activation checkpointing)",
            "about a third more compute: every layer runs forward twice",
        )
    if recipe.attention is not Attention.SDPA:
        yield RecipeChange(
            {"attention": Attention.SDPA},
            "fused attention (sdpa)",
            "faster; needs a flash or memory-efficient kernel on the device",
        )
    if recipe.optimizer is Optimizer.ADAMW and recipe.optimizer_impl is OptimizerImpl.FOREACH:
        yield RecipeChange(
            {"optimizer_impl": OptimizerImpl.FUSED},
            "fused AdamW",
            "faster; no temporary of the parameters' size in the update",
        )
    if not recipe.optimizer_in_backward and recipe.accumulate == 1:
        yield RecipeChange(
            {"optimizer_in_backward": True},
            "apply the optimizer in backward",
            "no gradient is kept; the norm is clipped unit by unit, and no step can be skipped",
        )
    if recipe.embedding is Embedding.ROOT and recipe.wrap is Wrap.LAYER:
        yield RecipeChange(
            {"embedding": Embedding.OWN},
            "a sharding unit of its own for the embedding",
            "one more gather a pass",
        )
    yield from _smaller_batches(recipe)


def _sharding(recipe: Recipe) -> Iterator[RecipeChange]:
    if recipe.engine is Engine.DDP:
        yield RecipeChange(
            {"engine": Engine.FSDP2, "sharding": Sharding.FULL},
            "shard parameters, gradients and optimizer state (FSDP)",
            "parameters are gathered layer by layer in forward and in backward",
        )
    elif recipe.sharding is not Sharding.FULL:
        yield RecipeChange(
            {"sharding": Sharding.FULL}
            | ({} if recipe.shard_ranks is None else {"shard_ranks": None}),
            "shard fully over all ranks",
            "one more gather of every layer a step",
        )
    if recipe.wrap is Wrap.ROOT:
        yield RecipeChange(
            {"wrap": Wrap.LAYER},
            "one sharding unit a layer",
            "one gather a layer, none of the whole",
        )
    if not recipe.reduce_each and recipe.accumulate > 1:
        yield RecipeChange(
            {"reduce_each": True},
            "reduce the gradients of every micro-batch",
            f"{recipe.accumulate} reductions a step instead of one",
        )
    if recipe.prefetch is not Prefetch.NONE:
        yield RecipeChange(
            {"prefetch": Prefetch.NONE}, "no backward prefetch", "gathers wait their turn"
        )


def _smaller_batches(recipe: Recipe) -> Iterator[RecipeChange]:
    """Yield micro-batches halved again and again, for the same global batch."""
    divisor = 2
    while divisor <= recipe.micro_batch:
        if recipe.micro_batch % divisor == 0:
            micro, accumulate = recipe.micro_batch // divisor, recipe.accumulate * divisor
            yield RecipeChange(
                {"micro_batch": micro, "accumulate": accumulate},
                f"micro-batches of {micro}, {accumulate} of them a step (the same global batch)",
                f"{divisor} times as many gathers; smaller matrix products",
            )
        divisor *= 2


def optimizer_changes(recipe: Recipe) -> Iterator[RecipeChange]:
    """Yield optimizers with less state, the closest to AdamW in float32 first."""
    if recipe.optimizer is Optimizer.SGD:
        return
    if recipe.optimizer is Optimizer.ADAMW:
        yield RecipeChange(
            _in_bfloat16(recipe, Optimizer.ADAMW_BF16),
            "AdamW with parameters and moments in bfloat16, stochastic rounding",
            "right on average but noisier: 8 bits of mantissa in parameters and moments",
            lossless=False,
        )
    if recipe.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_BF16):
        yield RecipeChange(
            {"optimizer": Optimizer.ADAFACTOR},
            "Adafactor",
            "another optimizer: factored second moments, no first moment; tune the rate anew",
            lossless=False,
        )
        yield RecipeChange(
            {"optimizer": Optimizer.ADAMW_8BIT},
            "AdamW with 8-bit moments",
            "moments in blocks of 8-bit codes: close to full precision, not equal",
            lossless=False,
        )
    if recipe.optimizer not in (Optimizer.ADAFACTOR, Optimizer.ADAMW_SPLIT24):
        yield RecipeChange(
            _in_bfloat16(recipe, Optimizer.ADAMW_SPLIT24),
            "AdamW with a 24-bit master, split, and 8-bit moments",
            "5 bytes a parameter in all: a master of 16 bits of mantissa, rounded stochastically",
            lossless=False,
        )


def _in_bfloat16(recipe: Recipe, optimizer: Optimizer) -> Changes:
    """Return the changes to an optimizer whose parameters are bfloat16."""
    changes: Changes = {"optimizer": optimizer, "parameters": Precision.BFLOAT16}
    if recipe.compute is Precision.FLOAT32:
        # FSDP gathers in the compute dtype, which may not be wider than the parameters.
        changes["compute"] = Precision.BFLOAT16
    return changes


def offload_changes(recipe: Recipe) -> Iterator[RecipeChange]:
    """Yield changes that move state to host memory."""
    if recipe.offload is Offload.NONE:
        yield RecipeChange(
            {"offload": Offload.OPTIMIZER},
            "optimizer state in host memory",
            "the update runs on the CPU: seconds a step for each billion parameters",
        )
    if recipe.offload is not Offload.ALL:
        yield RecipeChange(
            {"offload": Offload.ALL},
            "parameters, gradients and optimizer state in host memory",
            "the update runs on the CPU and every gather comes over the bus: several times slower",
        )
