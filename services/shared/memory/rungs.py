"""The rungs of the ladder of changes: what could make a job smaller, and what each costs.

The first rungs change no number that the training computes; then come optimizers that keep less;
then the host, at the price of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.shared.memory.beside import Beside, Placement
from services.shared.memory.hardware import Hardware
from services.shared.memory.plan import most_ranks
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

Changes = dict[str, Any]

# The one change that is not of the student's recipe: how the teacher beside it lies on the ranks.
TEACHER_PLACEMENT = "teacher_placement"


@dataclass(frozen=True)
class Rung:
    """One change of a recipe, in words, and what it costs."""

    changes: Changes
    change: str
    costs: str
    lossless: bool = True


def beside(teacher: Beside | None, hardware: Hardware) -> Iterator[Rung]:
    """Yield what touches the teacher alone."""
    if teacher is None or teacher.placement is Placement.SHARDED or hardware.ranks == 1:
        return
    if not teacher.whole_only and hardware.ranks <= most_ranks(teacher.shape):
        yield Rung(
            {TEACHER_PLACEMENT: Placement.SHARDED},
            "shard the teacher over all ranks",
            "its layers are gathered for every batch that it answers",
        )


def lossless(recipe: Recipe) -> Iterator[Rung]:
    """Yield what leaves every computed number as it is, the cheapest in time first."""
    yield from _sharding(recipe)
    if not recipe.activation_checkpointing:
        yield Rung(
            {"activation_checkpointing": True},
            "recompute activations (activation checkpointing)",
            "about a third more compute: every layer runs forward twice",
        )
    if recipe.attention is not Attention.SDPA:
        yield Rung(
            {"attention": Attention.SDPA},
            "fused attention (sdpa)",
            "faster; needs a flash or memory-efficient kernel on the device",
        )
    if recipe.optimizer is Optimizer.ADAMW and recipe.optimizer_impl is OptimizerImpl.FOREACH:
        yield Rung(
            {"optimizer_impl": OptimizerImpl.FUSED},
            "fused AdamW",
            "faster; no temporary of the parameters' size in the update",
        )
    if not recipe.optimizer_in_backward and recipe.accumulate == 1:
        yield Rung(
            {"optimizer_in_backward": True},
            "apply the optimizer in backward",
            "no gradient is kept; the norm is clipped unit by unit, and no step can be skipped",
        )
    if recipe.embedding is Embedding.ROOT and recipe.wrap is Wrap.LAYER:
        yield Rung(
            {"embedding": Embedding.OWN},
            "a sharding unit of its own for the embedding",
            "one more gather a pass",
        )
    yield from _smaller_batches(recipe)


def _sharding(recipe: Recipe) -> Iterator[Rung]:
    if recipe.engine is Engine.DDP:
        yield Rung(
            {"engine": Engine.FSDP2, "sharding": Sharding.FULL},
            "shard parameters, gradients and optimizer state (FSDP)",
            "parameters are gathered layer by layer in forward and in backward",
        )
    elif recipe.sharding is not Sharding.FULL:
        yield Rung(
            {"sharding": Sharding.FULL}
            | ({} if recipe.shard_ranks is None else {"shard_ranks": None}),
            "shard fully over all ranks",
            "one more gather of every layer a step",
        )
    if recipe.wrap is Wrap.ROOT:
        yield Rung(
            {"wrap": Wrap.LAYER},
            "one sharding unit a layer",
            "one gather a layer, none of the whole",
        )
    if not recipe.reduce_each and recipe.accumulate > 1:
        yield Rung(
            {"reduce_each": True},
            "reduce the gradients of every micro-batch",
            f"{recipe.accumulate} reductions a step instead of one",
        )
    if recipe.prefetch is not Prefetch.NONE:
        yield Rung({"prefetch": Prefetch.NONE}, "no backward prefetch", "gathers wait their turn")


def _smaller_batches(recipe: Recipe) -> Iterator[Rung]:
    """Yield halved micro-batches of the same global batch."""
    divisor = 2
    while divisor <= recipe.micro_batch:
        if recipe.micro_batch % divisor == 0:
            micro, accumulate = recipe.micro_batch // divisor, recipe.accumulate * divisor
            yield Rung(
                {"micro_batch": micro, "accumulate": accumulate},
                f"micro-batches of {micro}, {accumulate} of them a step (the same global batch)",
                f"{divisor} times as many gathers; smaller matrix products",
            )
        divisor *= 2


def smaller_state(recipe: Recipe) -> Iterator[Rung]:
    """Yield optimizers that keep less, the closest to AdamW in float32 first."""
    if recipe.optimizer is Optimizer.SGD:
        return
    if recipe.optimizer is Optimizer.ADAMW:
        narrow: Changes = {"optimizer": Optimizer.ADAMW_BF16, "parameters": Precision.BFLOAT16}
        if recipe.compute is Precision.FLOAT32:
            # FSDP gathers in the compute dtype; a wider one would restore what was not kept.
            narrow["compute"] = Precision.BFLOAT16
        yield Rung(
            narrow,
            "AdamW with parameters and moments in bfloat16, stochastic rounding",
            "right on average but noisier: 8 bits of mantissa in parameters and moments",
            lossless=False,
        )
    if recipe.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_BF16):
        yield Rung(
            {"optimizer": Optimizer.ADAFACTOR},
            "Adafactor",
            "another optimizer: factored second moments, no first moment; tune the rate anew",
            lossless=False,
        )
        yield Rung(
            {"optimizer": Optimizer.ADAMW_8BIT},
            "AdamW with 8-bit moments",
            "moments in blocks of 8-bit codes: close to full precision, not equal",
            lossless=False,
        )


def on_the_host(recipe: Recipe) -> Iterator[Rung]:
    """Yield what moves to the host's memory."""
    if recipe.offload is Offload.NONE:
        yield Rung(
            {"offload": Offload.OPTIMIZER},
            "optimizer state in host memory",
            "the update runs on the CPU: seconds a step for each billion parameters",
        )
    if recipe.offload is not Offload.ALL:
        yield Rung(
            {"offload": Offload.ALL},
            "parameters, gradients and optimizer state in host memory",
            "the update runs on the CPU and every gather comes over the bus: several times slower",
        )
