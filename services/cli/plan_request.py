"""The options of `stillhouse plan` and `stillhouse trace`, which describe a job."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from services.cli.terminal import printable
from services.shared.memory.architecture.shape import Shape, load, preset_names
from services.shared.memory.cgroup import host_memory_bytes
from services.shared.memory.errors import InvalidInput
from services.shared.memory.hardware import Hardware, find_device, machine
from services.shared.memory.planning.frozen_teacher import FrozenTeacher, Placement
from services.shared.memory.recipe import (
    Attention,
    Embedding,
    Engine,
    Loading,
    Offload,
    Optimizer,
    OptimizerImpl,
    Precision,
    Prefetch,
    Recipe,
    Sharding,
    Wrap,
)
from services.shared.memory.sizes import parse_size

_INVALID_INPUT = 2  # the exit code that Typer uses for an invalid option


@dataclass(frozen=True)
class PlanRequest:
    """A job as the options describe it; `model` and `teacher_model` are what they named."""

    model: str
    shape: Shape
    recipe: Recipe
    hardware: Hardware
    teacher_model: str | None
    teacher: FrozenTeacher | None


def read_request(
    model: Annotated[
        str,
        typer.Option(help="Preset, checkpoint directory, config.json or safetensors index."),
    ] = "",
    ranks: Annotated[int, typer.Option(help="Devices that share the job.")] = 8,
    device: Annotated[str, typer.Option(help="Kind of device, for example k100_ai.")] = "k100_ai",
    device_memory: Annotated[
        str | None, typer.Option(help="As the driver reports it: 65520MiB, 64GiB, 64GB.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Of the node; default: this machine's.")
    ] = None,
    reserve: Annotated[
        str | None, typer.Option(help="Context, collectives and workspaces on each device.")
    ] = None,
    micro_batch: Annotated[int, typer.Option(help="Texts per rank and forward pass.")] = 1,
    sequence_length: Annotated[int, typer.Option(help="Tokens of each text.")] = 2048,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    reduce_each: Annotated[
        bool, typer.Option(help="Reduce every micro-batch, or keep unsharded gradients (no_sync).")
    ] = True,
    parameters: Annotated[
        Precision, typer.Option(help="Dtype of stored parameters.")
    ] = Precision.FLOAT32,
    compute: Annotated[Precision, typer.Option(help="Dtype of computation.")] = Precision.BFLOAT16,
    reduce: Annotated[
        Precision, typer.Option(help="Dtype of gradient reduction.")
    ] = Precision.BFLOAT16,
    optimizer: Annotated[Optimizer, typer.Option(help="Update rule.")] = Optimizer.ADAMW,
    optimizer_impl: Annotated[
        OptimizerImpl, typer.Option(help="Implementation of AdamW and SGD.")
    ] = OptimizerImpl.FUSED,
    optimizer_in_backward: Annotated[
        bool, typer.Option(help="Apply each gradient at once and free it.")
    ] = False,
    activation_checkpointing: Annotated[
        bool, typer.Option(help="Recompute each layer in backward.")
    ] = True,
    attention: Annotated[
        Attention, typer.Option(help="sdpa is a fused kernel; math and eager materialise scores.")
    ] = Attention.SDPA,
    attention_mask: Annotated[
        bool, typer.Option(help="Whether an explicit mask is materialised.")
    ] = True,
    sharding: Annotated[Sharding, typer.Option(help="What is sharded.")] = Sharding.FULL,
    shard_ranks: Annotated[
        int | None, typer.Option(help="Ranks of one group, for hybrid sharding.")
    ] = None,
    wrap: Annotated[Wrap, typer.Option(help="Sharding units.")] = Wrap.LAYER,
    embedding: Annotated[
        Embedding, typer.Option(help="In the root unit, or a unit of its own.")
    ] = Embedding.ROOT,
    prefetch: Annotated[Prefetch, typer.Option(help="FSDP1's backward prefetch.")] = Prefetch.NONE,
    fsdp: Annotated[
        int | None,
        typer.Option(min=1, max=2, help="FSDP generation; default: by the installed torch."),
    ] = None,
    offload: Annotated[Offload, typer.Option(help="What is kept in host memory.")] = Offload.NONE,
    loading: Annotated[
        Loading, typer.Option(help="Ranks that hold the whole checkpoint while loading.")
    ] = Loading.SLICED,
    heads: Annotated[
        str | None, typer.Option(help="Classes of each classifier head, like 3,7.")
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(help="Plan a distillation from this teacher; a model as in --model."),
    ] = None,
    teacher_placement: Annotated[
        Placement, typer.Option(help="Shard the teacher over all ranks, or replicate it.")
    ] = Placement.SHARDED,
) -> PlanRequest:
    """Return the job that the options describe. Raises InvalidInput."""
    if not model:
        raise InvalidInput(
            "model", "is missing", accepted="a preset like qwen3-32b, a directory, a config.json"
        )
    classes = _classes(heads)
    return PlanRequest(
        model=model,
        shape=load(model, heads=classes),
        hardware=_hardware(
            device,
            ranks=ranks,
            device_memory=device_memory,
            host_memory=host_memory,
            reserve=reserve,
        ),
        recipe=Recipe(
            sharding=sharding,
            engine=_engine(fsdp),
            shard_ranks=shard_ranks,
            wrap=wrap,
            embedding=embedding,
            prefetch=prefetch,
            parameters=parameters,
            compute=compute,
            reduce=reduce,
            optimizer=optimizer,
            optimizer_impl=optimizer_impl,
            optimizer_in_backward=optimizer_in_backward,
            activation_checkpointing=activation_checkpointing,
            attention=attention,
            attention_mask=attention_mask,
            micro_batch=micro_batch,
            sequence_length=sequence_length,
            accumulate=accumulate,
            reduce_each=reduce_each,
            offload=offload,
            loading=loading,
        ),
        teacher_model=teacher,
        teacher=FrozenTeacher(load(teacher, heads=classes), teacher_placement) if teacher else None,
    )


def takes_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `read_request` to a command, whose first argument is then the request.

    Invalid input, in the options or raised by the command, ends with exit code 2 and names its field.
    """
    options = dict(inspect.signature(read_request).parameters)
    _, *own = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def run(**values: Any) -> None:
        plan_options = {name: values.pop(name) for name in options}
        if values.get("largest_model") and not plan_options["model"]:
            plan_options["model"] = preset_names()[0]  # any: all models are asked about
        try:
            command(read_request(**plan_options), **values)
        except InvalidInput as error:
            _refuse(error, command=command.__name__, as_json=values.get("as_json", False))

    hints = get_type_hints(read_request, include_extras=True)
    hints |= get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY)
        for parameter in (*options.values(), *own)
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # Typer would follow it to the command
    return run


def _hardware(
    device: str,
    *,
    ranks: int,
    device_memory: str | None,
    host_memory: str | None,
    reserve: str | None,
) -> Hardware:
    host = parse_size(host_memory, field="host_memory") if host_memory else host_memory_bytes()
    memory = parse_size(device_memory, field="device_memory") if device_memory else None
    if memory is None and host is not None and find_device(device).name == "cpu":
        memory = host // max(ranks, 1)  # the ranks share the host, which is their device
    return machine(
        device,
        ranks=ranks,
        device_memory_bytes=memory,
        reserve_bytes=parse_size(reserve, field="reserve") if reserve else None,
        host_memory_bytes=host,
    )


def _classes(heads: str | None) -> list[int]:
    if not heads:
        return []
    try:
        return [int(part) for part in heads.split(",")]
    except ValueError as error:
        raise InvalidInput("heads", f"{heads!r}", accepted="classes per head, like 3,7") from error


def _engine(fsdp: int | None) -> Engine:
    if fsdp is not None:
        return Engine.FSDP1 if fsdp == 1 else Engine.FSDP2
    try:
        return Engine.of_torch(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return Engine.FSDP2


def _refuse(error: InvalidInput, *, command: str, as_json: bool) -> NoReturn:
    problem = {"field": error.field, "problem": error.problem, "accepted": error.accepted}
    if as_json:
        typer.echo(json.dumps({"error": problem}))
    typer.echo(printable(f"stillhouse {command}: {error}"), err=True)
    raise typer.Exit(_INVALID_INPUT)
