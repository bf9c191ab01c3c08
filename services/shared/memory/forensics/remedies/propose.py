"""Remedies for a failure: the fault itself first, then the recipes that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics.case_to_plan import hardware_of, recipe_of, viewed
from services.shared.memory.forensics.diagnosis import (
    Cause,
    FewerRanks,
    Hypothesis,
    Launcher,
    LauncherLine,
    RecipeChanges,
    Remedy,
    Strength,
)
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import Framework
from services.shared.memory.forensics.other_trainings import ZERO_STAGES
from services.shared.memory.forensics.remedies.direct_fixes import (
    direct_fixes,
    host_lines,
    loading_lines,
    smaller_jobs,
)
from services.shared.memory.forensics.remedies.launcher_lines import (
    lines_of_changes,
    sharding,
    suitable,
    transformers,
)
from services.shared.memory.forensics.scenarios import plan_with
from services.shared.memory.forensics.state_size import Needs
from services.shared.memory.forensics.stated_failure import failure_is_stated
from services.shared.memory.planning.alternatives import Alternative, alternatives
from services.shared.memory.planning.plan import Plan, plan
from services.shared.memory.planning.plan_contract import Verdict
from services.shared.memory.planning.timeline_views import FrozenBase
from services.shared.memory.recipe import Engine, Offload, OptimizerImpl, Recipe, Sharding
from services.shared.memory.sizes import format_size

_MOST_RECIPES = 6
# Fields of a recipe that DeepSpeed has no setting for.
_OF_THE_WHOLE_STATE = frozenset(
    {"optimizer", "optimizer_impl", "optimizer_in_backward", "embedding"}
)
_NOT_IN_DEEPSPEED = frozenset({"embedding", "optimizer_in_backward", "wrap", "prefetch"})
# Causes that a recipe of less memory fixes; the others need a fault removed instead.
_FIXED_BY_SMALLER_RECIPE = frozenset(
    {
        Cause.CAPACITY,
        Cause.OPTIMIZER_TEMPORARIES,
        Cause.FP32_UPCAST,
        Cause.LOGITS_OR_ACTIVATIONS,
        Cause.WRAP_TOO_COARSE,
        Cause.NOT_SHARDED,
        Cause.UNDECIDED,
    }
)


def propose_remedies(
    evidence: Evidence, needs: Needs | None, cause: Cause, hypotheses: tuple[Hypothesis, ...]
) -> tuple[Remedy, ...]:
    """Return what to change, the fault itself first, with the peak per rank after each change."""
    remedies = direct_fixes(evidence, cause)
    if cause is Cause.NOT_SHARDED:
        remedies.append(_enable_sharding(evidence, needs))
    if needs is not None and cause is Cause.HOST_MEMORY:
        remedies += _host_remedies(evidence, needs)
    if not failure_is_stated(evidence):
        return ()
    if fixed_by_smaller_recipe(cause, device=evidence.device):
        remedies += _reduce_every_micro_batch(evidence, hypotheses)
        planned = _recipe_remedies(evidence, cause)
        remedies += planned or smaller_jobs(evidence, cause)
    if cause is Cause.UNDECIDED and failure_is_stated(evidence):
        remedies += _fixes_of_those_left(evidence, hypotheses)
    return tuple(remedies)


def _fixes_of_those_left(
    evidence: Evidence, hypotheses: tuple[Hypothesis, ...]
) -> Iterator[Remedy]:
    """Yield what removes each cause that is left, for a reader who has to try one of them now."""
    left = [h.cause for h in hypotheses if h.strength is Strength.POSSIBLE]
    for cause in dict.fromkeys(left):
        for fix in direct_fixes(evidence, cause):
            yield replace(fix, change=f"if it is {str(cause).replace('_', ' ')}: {fix.change}")


def fixed_by_smaller_recipe(cause: Cause, *, device: str | None) -> bool:
    """Return whether a recipe of less memory helps; on a CPU the host's memory is the device's."""
    return cause in _FIXED_BY_SMALLER_RECIPE or (cause is Cause.HOST_MEMORY and device == "cpu")


def _enable_sharding(evidence: Evidence, needs: Needs | None) -> Remedy:
    planned = plan_with(evidence, engine=Engine.FSDP2, sharding=Sharding.FULL)
    return Remedy(
        change=_sharding_change(evidence, needs),
        predicted_peak_bytes=planned.peak_bytes if planned else None,
        verdict=planned.verdict if planned else Verdict.UNKNOWN,
        costs="none: it is what was intended; layers are gathered as they are needed",
        lines=_sharding_lines(evidence),
    )


def _sharding_lines(evidence: Evidence) -> tuple[LauncherLine, ...]:
    if evidence.precision.full_eval:
        return (transformers("--bf16_full_eval false --fp16_full_eval false"),)
    if evidence.shards_parameters and evidence.framework is not Framework.ZERO3:
        return loading_lines(evidence)  # it was configured, and the model is loaded whole
    return suitable(evidence, list(sharding(evidence)))


def _share_of_weights(evidence: Evidence, needs: Needs | None) -> str:
    if needs is None or not needs.sharded_weights_bytes or (evidence.ranks or 1) < 2:
        return ""
    return f": {format_size(needs.sharded_weights_bytes)} of weights a rank"


def _sharding_change(evidence: Evidence, needs: Needs | None) -> str:
    framework = evidence.framework
    if evidence.precision.full_eval:
        return "switch bf16_full_eval off: it moves the whole model to the card before wrapping"
    if framework is Framework.ZERO3:
        return (
            "make zero.Init active: create the DeepSpeed configuration before from_pretrained, "
            f"with stage 3{_share_of_weights(evidence, needs)}"
        )
    if framework in (Framework.ZERO1, Framework.ZERO2):
        return "ZeRO stage 3 (or FSDP): the stages below never divide the parameters"
    if framework in (Framework.DDP, Framework.NONE):
        return (
            "configure sharding (fsdp: full_shard with a layer wrap policy, or ZeRO-3) and start "
            "with torchrun, before the model is loaded"
        )
    return (
        "load on the CPU or the meta device and let FSDP move the shards (sync_module_states, "
        "cpu_ram_efficient_loading); with Trainer check that `fsdp` itself is set, not only "
        "fsdp_config, and that no Accelerator is created in between"
    )


def _host_remedies(evidence: Evidence, needs: Needs) -> list[Remedy]:
    remedies = []
    host = evidence.case.host_memory_bytes
    if evidence.offloads and needs.host_bytes and host and host > needs.host_bytes:
        text = (
            f"find what else is in host memory: offloading takes {format_size(needs.host_bytes)} "
            f"of {format_size(host)}; look at data loaders (num_workers), copies of the "
            "checkpoint by every rank, the container's own limit (docker --memory, cgroup "
            "memory.max), other jobs"
        )
        limit = LauncherLine(Launcher.SHELL, "cat /sys/fs/cgroup/memory.max")
        remedies.append(Remedy(text, None, Verdict.UNKNOWN, "none", lines=(limit,)))
    elif evidence.offloads and needs.host_bytes:
        text = f"give the host {format_size(needs.host_bytes)}, or do not offload"
        costs = "offloading moves the state to the host, it does not make it smaller"
        lines = host_lines(evidence, needs.host_bytes)
        remedies.append(Remedy(text, None, Verdict.UNKNOWN, costs, lines=lines))
    if evidence.ranks and evidence.ranks > 1:
        each = needs.whole_weights_bytes
        text = (
            "read the checkpoint on rank 0 alone, or each rank only its slices: "
            f"{format_size(each)} instead of {format_size(each * evidence.ranks)} of host memory"
        )
        lines = loading_lines(evidence)
        remedies.append(Remedy(text, None, Verdict.UNKNOWN, "loading takes longer", lines=lines))
    return remedies


def _reduce_every_micro_batch(
    evidence: Evidence, hypotheses: tuple[Hypothesis, ...]
) -> list[Remedy]:
    """Propose reducing every micro-batch where unreduced gradients are a possible explanation."""
    if not any("no_sync" in h.what and h.strength is not Strength.EXCLUDED for h in hypotheses):
        return []
    planned = plan_with(
        evidence, accumulate=2, reduce_each=True, optimizer_impl=OptimizerImpl.FUSED
    )
    if planned is None:
        return []
    change = (
        "reduce the gradients of every micro-batch (accelerate: gradient_accumulation_kwargs "
        "sync_each_batch)"
    )
    remedy = _as_remedy(evidence, planned, change, "one reduction more a micro-batch", {})
    return [replace(remedy, lines=lines_of_changes(evidence, {"reduce_each": True}))]


def _recipe_remedies(evidence: Evidence, cause: Cause) -> list[Remedy]:
    base = _base_recipe(evidence, cause)
    hardware = hardware_of(evidence)
    if base is None or hardware is None or evidence.shape is None:
        return []
    try:
        base, view = viewed(evidence, base, hardware.ranks)
        # The changes of a recipe are not ZeRO's; the same job under FSDP is what they are planned for.
        only_adapters = view if isinstance(view, FrozenBase) else None
        offered = [
            offer
            for offer in alternatives(evidence.shapes[-1], base, hardware, view=only_adapters)
            if not _unavailable(evidence) & set(offer.changes)
        ]
    except InvalidInput:
        return []
    remedies = [_from_alternative(evidence, offer) for offer in offered[:_MOST_RECIPES]]
    return remedies + _rejected_offload(evidence, base)


def _unavailable(evidence: Evidence) -> frozenset[str]:
    """Return the fields of a recipe that would not help this way of training, or do not exist in it."""
    if evidence.trains_adapters:
        return _OF_THE_WHOLE_STATE
    return _NOT_IN_DEEPSPEED if evidence.framework in ZERO_STAGES else frozenset()


def _base_recipe(evidence: Evidence, cause: Cause) -> Recipe | None:
    """Return the recipe to improve on, with the optimizer that needs no temporaries.

    It is sharded, unless whole weights on every rank are known not to be the fault.
    """
    changes: dict[str, Any] = {"reduce_each": True, "offload": Offload.NONE}
    if evidence.optimizer_impl is None:
        changes["optimizer_impl"] = OptimizerImpl.FUSED
    whole = not evidence.shards_parameters and (evidence.ranks or 1) > 1
    if whole and cause is not Cause.LOGITS_OR_ACTIVATIONS:
        changes |= {"engine": Engine.FSDP2, "sharding": Sharding.FULL}
    try:
        return recipe_of(evidence, **changes)
    except InvalidInput:
        return None


def _from_alternative(evidence: Evidence, offer: Alternative) -> Remedy:
    return _as_remedy(evidence, offer.plan, offer.change, offer.costs, dict(offer.changes))


def _as_remedy(
    evidence: Evidence, planned: Plan, change: str, costs: str, changes: RecipeChanges
) -> Remedy:
    return Remedy(
        change=change,
        predicted_peak_bytes=planned.peak_bytes,
        verdict=planned.verdict,
        costs=costs,
        changes=changes,
        one_rank_less=_one_rank_less(evidence, planned),
        lines=lines_of_changes(evidence, changes),
    )


def _one_rank_less(evidence: Evidence, planned: Plan) -> FewerRanks | None:
    """Return the prediction for one rank less, as when a device has failed."""
    ranks = (evidence.ranks or 1) - 1
    hardware = hardware_of(evidence, ranks=ranks) if ranks >= 2 else None
    if hardware is None:
        return None
    try:
        fewer = plan(planned.shape, planned.recipe, hardware, view=planned.view)
    except InvalidInput:
        return None
    return FewerRanks(ranks, fewer.peak_bytes, fewer.verdict)


def _rejected_offload(evidence: Evidence, base: Recipe) -> list[Remedy]:
    """Return full offload as rejected where host memory does not suffice."""
    planned = plan_with(evidence, **{**vars(base), "offload": Offload.ALL})
    if planned is None or planned.host_verdict is not Verdict.DOES_NOT_FIT:
        return []
    memory = planned.hardware.host_memory_bytes or 0
    costs = (
        f"refused: gradients and optimizer state follow the weights, so the host needs "
        f"{format_size(planned.host.peak_bytes)} and has {format_size(memory)}; the kernel would "
        "kill the ranks"
    )
    return [
        Remedy(
            change="offload parameters, gradients and optimizer state to host memory",
            predicted_peak_bytes=planned.peak_bytes,
            verdict=Verdict.DOES_NOT_FIT,
            costs=costs,
            changes={"offload": str(Offload.ALL)},
        )
    ]
