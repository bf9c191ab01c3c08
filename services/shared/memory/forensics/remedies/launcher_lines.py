"""Changes of a recipe as lines to paste, in the form that each launcher takes.

Names of settings: accelerate 1.x (`commands/config/config_args.py`, `utils/dataclasses.py`), DeepSpeed 0.x
(`runtime/config.py`, `runtime/zero/config.py`), transformers 4.x and 5.x (`training_args.py`), torch 2.x.
A line for accelerate's YAML names the section that it belongs to in its comment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from services.shared.memory.forensics.diagnosis import Launcher, LauncherLine, RecipeChanges
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import Framework
from services.shared.memory.recipe import Attention, Offload, Optimizer, OptimizerImpl

_ZERO = (Framework.ZERO1, Framework.ZERO2, Framework.ZERO3)
_FSDP = (Framework.FSDP1, Framework.FSDP2)
_TRANSFORMERS_OPTIMIZERS = {
    Optimizer.ADAFACTOR: "adafactor",
    Optimizer.ADAMW_8BIT: "adamw_bnb_8bit",
    Optimizer.SGD: "sgd",
}
_PYTHON_OPTIMIZERS = {
    Optimizer.ADAMW_BF16: "torchao.optim._AdamW(model.parameters(), bf16_stochastic_round=True)",
    Optimizer.ADAMW_8BIT: "bitsandbytes.optim.AdamW8bit(model.parameters())",
    Optimizer.ADAFACTOR: "torch.optim.Adafactor(model.parameters())",
}


def lines_of_changes(evidence: Evidence, changes: RecipeChanges) -> tuple[LauncherLine, ...]:
    """Return the lines that make `changes`, those of the job's own framework only."""
    found: list[LauncherLine] = []
    for field, render in _RENDERERS.items():
        if field in changes:
            found += render(evidence, changes)
    return suitable(evidence, found)


def suitable(evidence: Evidence, lines: list[LauncherLine]) -> tuple[LauncherLine, ...]:
    """Return the lines that the job's framework reads, the most specific launcher first."""
    excluded: set[Launcher] = set()
    if evidence.framework in _FSDP:
        excluded.add(Launcher.DEEPSPEED)
    distinct = dict.fromkeys(line for line in lines if line.launcher not in excluded)
    first = Launcher.DEEPSPEED if evidence.framework in _ZERO else None
    return tuple(sorted(distinct, key=lambda line: line.launcher is not first))


def deepspeed(**settings: object) -> LauncherLine:
    """Return an object to merge into DeepSpeed's JSON."""
    return LauncherLine(Launcher.DEEPSPEED, json.dumps(settings))


def transformers(options: str) -> LauncherLine:
    """Return options of transformers' TrainingArguments."""
    return LauncherLine(Launcher.TRANSFORMERS, options)


def accelerate(setting: str, *, section: str) -> LauncherLine:
    """Return a line of accelerate's YAML for `section`, or for the top level where it is empty."""
    where = f"under {section}" if section else "at the top level"
    return LauncherLine(Launcher.ACCELERATE, f"{setting}  # {where}")


def _optimizer(_evidence: Evidence, changes: RecipeChanges) -> Iterator[LauncherLine]:
    kind = Optimizer(str(changes["optimizer"]))
    if kind in _TRANSFORMERS_OPTIMIZERS:
        yield transformers(f"--optim {_TRANSFORMERS_OPTIMIZERS[kind]}")
    if kind in _PYTHON_OPTIMIZERS:
        yield LauncherLine(Launcher.PYTHON, f"optimizer = {_PYTHON_OPTIMIZERS[kind]}")


def _implementation(evidence: Evidence, changes: RecipeChanges) -> Iterator[LauncherLine]:
    if changes["optimizer_impl"] == OptimizerImpl.FUSED:
        yield from fused_update(evidence)


def fused_update(evidence: Evidence) -> Iterator[LauncherLine]:
    """Yield the lines of an update without temporaries of the parameters' size."""
    if evidence.framework is Framework.ZERO3:
        yield deepspeed(zero_optimization={"sub_group_size": 100_000_000})
        return
    if evidence.framework in _ZERO:
        # The update of stages 1 and 2 copies the whole partition; stage 3 works in sub-groups.
        yield deepspeed(zero_optimization={"stage": 3, "sub_group_size": 100_000_000})
        return
    yield transformers("--optim adamw_torch_fused")
    yield LauncherLine(
        Launcher.PYTHON, "optimizer = torch.optim.AdamW(model.parameters(), fused=True)"
    )


def _in_backward(_evidence: Evidence, _changes: RecipeChanges) -> Iterator[LauncherLine]:
    yield LauncherLine(
        Launcher.PYTHON,
        "torch.distributed.optim._apply_optimizer_in_backward(torch.optim.AdamW, "
        'model.parameters(), {"lr": 1e-5})',
    )


def _checkpointing(evidence: Evidence, _changes: RecipeChanges) -> Iterator[LauncherLine]:
    yield from checkpointing(evidence)


def checkpointing(evidence: Evidence) -> Iterator[LauncherLine]:
    """Yield the lines that recompute activations."""
    if evidence.framework in _FSDP:
        # transformers warns of its own flag under FSDP: it gathers every layer once more.
        yield transformers("--fsdp_config '{\"activation_checkpointing\": true}'")
        yield accelerate("fsdp_activation_checkpointing: true", section="fsdp_config")
        return
    yield transformers("--gradient_checkpointing true")
    yield LauncherLine(Launcher.PYTHON, "model.gradient_checkpointing_enable()")


def _micro_batch(_evidence: Evidence, changes: RecipeChanges) -> Iterator[LauncherLine]:
    size, steps = changes["micro_batch"], changes.get("accumulate", 1)
    yield deepspeed(train_micro_batch_size_per_gpu=size, gradient_accumulation_steps=steps)
    yield transformers(
        f"--per_device_train_batch_size {size} --gradient_accumulation_steps {steps}"
    )


def _attention(_evidence: Evidence, changes: RecipeChanges) -> Iterator[LauncherLine]:
    if changes["attention"] == Attention.SDPA:
        yield LauncherLine(
            Launcher.PYTHON, 'AutoModel.from_pretrained(name, attn_implementation="sdpa")'
        )


def _reduce_each(_evidence: Evidence, _changes: RecipeChanges) -> Iterator[LauncherLine]:
    kwargs = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    yield transformers(f"--accelerator_config '{json.dumps(kwargs)}'")
    yield LauncherLine(
        Launcher.PYTHON,
        "Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin("
        "num_steps=4, sync_each_batch=True))",
    )


def _offload(evidence: Evidence, changes: RecipeChanges) -> Iterator[LauncherLine]:
    everything = changes["offload"] == Offload.ALL
    devices = {"offload_optimizer": {"device": "cpu"}}
    if everything:
        devices["offload_param"] = {"device": "cpu"}
    if evidence.framework not in _FSDP:
        stage = {"stage": 3} if everything else {}
        yield deepspeed(zero_optimization={**stage, **devices})
    if everything and evidence.framework not in _ZERO:
        yield transformers('--fsdp "full_shard auto_wrap offload"')
        yield accelerate("fsdp_offload_params: true", section="fsdp_config")


def _engine(evidence: Evidence, _changes: RecipeChanges) -> Iterator[LauncherLine]:
    yield from sharding(evidence)


def sharding(evidence: Evidence) -> Iterator[LauncherLine]:
    """Yield the lines that divide parameters, gradients and optimizer state over the ranks."""
    ranks = max(2, evidence.ranks or 2)
    if evidence.framework not in _FSDP:
        yield deepspeed(zero_optimization={"stage": 3})
    if evidence.framework not in _ZERO:
        yield transformers('--fsdp "full_shard auto_wrap"')
        yield accelerate(
            "{distributed_type: FSDP, fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: "
            f"TRANSFORMER_BASED_WRAP}}, num_processes: {ranks}}}",
            section="",
        )
    else:
        yield accelerate("zero_stage: 3", section="deepspeed_config")
        yield accelerate("zero3_init_flag: true", section="deepspeed_config")
    yield LauncherLine(Launcher.TORCHRUN, f"torchrun --nproc-per-node {ranks} train.py")


def _wrap(evidence: Evidence, _changes: RecipeChanges) -> Iterator[LauncherLine]:
    yield from layer_wrapping(evidence)


def layer_wrapping(evidence: Evidence) -> Iterator[LauncherLine]:
    """Yield the lines that make every layer a sharding unit."""
    if evidence.framework in _ZERO:
        return
    yield accelerate("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", section="fsdp_config")
    yield transformers('--fsdp "full_shard auto_wrap"')
    yield LauncherLine(Launcher.PYTHON, "for layer in model.model.layers: fully_shard(layer)")


_RENDERERS: dict[str, Callable[[Evidence, RecipeChanges], Iterator[LauncherLine]]] = {
    "engine": _engine,
    "wrap": _wrap,
    "optimizer": _optimizer,
    "optimizer_impl": _implementation,
    "optimizer_in_backward": _in_backward,
    "activation_checkpointing": _checkpointing,
    "micro_batch": _micro_batch,
    "attention": _attention,
    "reduce_each": _reduce_each,
    "offload": _offload,
}
