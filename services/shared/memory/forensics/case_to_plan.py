"""The recipe and the hardware of a case; the framework's defaults fill what it leaves out."""

from __future__ import annotations

import re
from typing import Any

from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import Framework
from services.shared.memory.hardware import DEVICES, Device, Hardware
from services.shared.memory.planning.timeline_views import (
    FrozenBase,
    TimelineView,
    ZeroPartitions,
)
from services.shared.memory.recipe import (
    Engine,
    Loading,
    Offload,
    Optimizer,
    OptimizerImpl,
    Precision,
    Recipe,
    Sharding,
)

# Reserve of a card of unknown kind: a share near that of the known ones (0.02 to 0.06).
_RESERVE_SHARE = 0.04
_ENGINES = {
    Framework.FSDP1: Engine.FSDP1,
    Framework.FSDP2: Engine.FSDP2,
    Framework.ZERO3: Engine.FSDP2,
    Framework.ZERO1: Engine.DDP,
    Framework.ZERO2: Engine.DDP,
    Framework.DDP: Engine.DDP,
    Framework.NONE: Engine.DDP,
}
# transformers takes the fused AdamW by default from torch 2.8 on, the multi-tensor one before.
_FUSED_DEFAULT_FROM = (2, 8)
DEFAULT_SEQUENCE_LENGTH = 2048


def recipe_of(evidence: Evidence, **changes: Any) -> Recipe:
    """Return the recipe of the case, defaults filled in, with `changes` applied.

    Raises InvalidInput where the changes do not go together.
    """
    case = evidence.case
    sharded = evidence.shards_parameters
    engine = _ENGINES.get(evidence.framework or Framework.FSDP2, Engine.FSDP2)
    sharding = evidence.sharding if sharded else Sharding.NONE
    if sharding is Sharding.HYBRID:
        sharding = Sharding.FULL  # the size of its groups is not known
    values: dict[str, Any] = {
        "engine": engine,
        "sharding": sharding or Sharding.FULL,
        "parameters": state_precision(evidence),
        "optimizer": evidence.optimizer or Optimizer.ADAMW,
        "optimizer_impl": evidence.optimizer_impl or default_implementation(evidence),
        "optimizer_in_backward": bool(case.optimizer_in_backward),
        "activation_checkpointing": case.activation_checkpointing is not False,
        "micro_batch": case.micro_batch or 1,
        "sequence_length": case.sequence_length or DEFAULT_SEQUENCE_LENGTH,
        "accumulate": case.accumulate or 1,
        "offload": _offload(evidence),
        "loading": Loading.RANK0,
    }
    if evidence.trains_adapters and _stated_parameters(evidence) is None:
        # Frozen weights are loaded in the compute dtype.
        values |= {"parameters": Precision.BFLOAT16, "upcast_after_wrap": False}
    if values["parameters"].size_bytes == 2 or evidence.precision.mixed:
        half = Precision.FLOAT16 if _half_is_float16(evidence) else Precision.BFLOAT16
        values["compute"] = values["reduce"] = half
    elif _stated_parameters(evidence) is Precision.FLOAT32 and not evidence.precision.mixed:
        values["compute"] = values["reduce"] = values["checkpoint"] = Precision.FLOAT32
    return Recipe(**{**values, **changes})


_ZERO_STAGES = {Framework.ZERO1: 1, Framework.ZERO2: 2, Framework.ZERO3: 3}
# Of all parameters, where the log does not count those that train: rank 16 on every matrix of a 7B model.
_ADAPTER_SHARE = 0.005


def viewed(evidence: Evidence, recipe: Recipe, ranks: int) -> tuple[Recipe, TimelineView | None]:
    """Return how the case's training differs from `recipe`, and the recipe from which that follows.

    Adapters have no state of the base under any recipe; ZeRO has its own partitions while the optimizer is
    AdamW on the device. Everything else is as the recipe says: the view is None.
    """
    if evidence.trains_adapters:
        stated = evidence.log.settings.trainable_parameters
        usual = int(_ADAPTER_SHARE * (evidence.num_parameters or 0))
        return recipe, FrozenBase(evidence.precision.bits, stated or usual)
    stage = _ZERO_STAGES.get(evidence.framework) if evidence.framework else None
    if stage is None or recipe.optimizer is not Optimizer.ADAMW or recipe.optimizer_in_backward:
        return recipe, None
    replica = recipe.engine is Engine.DDP
    if recipe.offload is not Offload.NONE or replica == (stage == 3):
        return recipe, None
    halves = recipe.with_changes({"parameters": recipe.compute, "upcast_after_wrap": False})
    return halves, ZeroPartitions(stage if replica else 3, ranks)


def _offload(evidence: Evidence) -> Offload:
    if not evidence.offloads:
        return Offload.NONE
    stated = f"{evidence.case.offload or ''} {evidence.case.sharding_strategy or ''}".lower()
    only_state = "optim" in stated and "param" not in stated and "all" not in stated.split()
    return Offload.OPTIMIZER if only_state else Offload.ALL


def default_implementation(evidence: Evidence) -> OptimizerImpl:
    """Return the default implementation of AdamW, which depends on the version of torch."""
    version = torch_version(evidence)
    if version is not None and version >= _FUSED_DEFAULT_FROM:
        return OptimizerImpl.FUSED
    return OptimizerImpl.FOREACH


def torch_version(evidence: Evidence) -> tuple[int, int] | None:
    """Return major and minor version of torch, where the case gives them."""
    stated = re.search(r"([0-9]{1,4})\.([0-9]{1,4})", str(evidence.case.versions.get("torch", "")))
    return (int(stated[1]), int(stated[2])) if stated else None


def _stated_parameters(evidence: Evidence) -> Precision | None:
    return evidence.case.parameters or evidence.precision.parameters


def state_precision(evidence: Evidence) -> Precision:
    """Return the dtype of stored parameters: as given, else float32 as in mixed precision."""
    return _stated_parameters(evidence) or Precision.FLOAT32


def _half_is_float16(evidence: Evidence) -> bool:
    words = (evidence.case.precision or "").lower()
    return ("fp16" in words or "float16" in words.replace("bfloat16", "")) and "bf16" not in words


def hardware_of(evidence: Evidence, *, ranks: int | None = None) -> Hardware | None:
    """Return the hardware of the case; the reserve is what the message shows outside of torch.

    An unnamed device has at least what was allocated and requested. None where neither that nor the
    number of ranks is known.
    """
    count, card = ranks or evidence.ranks, evidence.card_bytes or _least_card(evidence)
    if not count or not card:
        return None
    known = DEVICES.get(evidence.device or "")
    outside = evidence.accounts.outside_bytes
    if outside is not None and evidence.accounts.foreign_bytes == 0:
        reserve = outside
    else:
        reserve = known.reserve_bytes if known else int(_RESERVE_SHARE * card)
    uncertainty = known.uncertainty_bytes if known else reserve // 2
    source = known.source if known else "a share near that of known cards"
    name = known.name if known else "unknown card"
    device = Device(name, card, min(reserve, card // 2), uncertainty, source)
    try:
        return Hardware(device, count, evidence.case.host_memory_bytes)
    except InvalidInput:
        return None


def _least_card(evidence: Evidence) -> int | None:
    allocated, requested = evidence.accounts.allocated_bytes, evidence.accounts.requested_bytes
    if allocated is None or requested is None:
        return None
    return int((allocated + requested) / (1 - _RESERVE_SHARE))
