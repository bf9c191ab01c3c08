"""`stillhouse plan`: what a training job takes on each rank, and what would make it fit."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console

from services.cli.plan_view import show_plan
from services.shared.memory.cgroup import host_memory_bytes
from services.shared.memory.errors import InvalidInput
from services.shared.memory.hardware import Hardware, find_device, machine
from services.shared.memory.plan import Plan, Verdict, plan_distillation
from services.shared.memory.plan import plan as plan_job
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
from services.shared.memory.remedies import Alternative, alternatives, refused_by_host
from services.shared.memory.shape import Shape, load
from services.shared.memory.sizes import parse_size

_INVALID_INPUT = 2  # the exit code that Typer itself uses for a bad option


def plan(
    model: Annotated[
        str,
        typer.Option(help="Preset, checkpoint directory, config.json or safetensors index."),
    ],
    ranks: Annotated[int, typer.Option(help="Devices that share the job.")] = 8,
    device: Annotated[str, typer.Option(help="Kind of device, for example k100_ai.")] = "k100_ai",
    device_memory: Annotated[
        str | None, typer.Option(help="As the driver gives it: 65520MiB, 64GiB, 64GB.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Of the node; this machine's where left out.")
    ] = None,
    reserve: Annotated[
        str | None, typer.Option(help="Context, collectives and workspaces on each device.")
    ] = None,
    micro_batch: Annotated[int, typer.Option(help="Texts a rank runs at once.")] = 1,
    sequence_length: Annotated[int, typer.Option(help="Tokens of each text.")] = 2048,
    accumulate: Annotated[int, typer.Option(help="Micro-batches a step.")] = 1,
    reduce_each: Annotated[
        bool, typer.Option(help="Reduce every micro-batch, or keep whole gradients (no_sync).")
    ] = True,
    parameters: Annotated[Precision, typer.Option(help="Storage.")] = Precision.FLOAT32,
    compute: Annotated[Precision, typer.Option(help="Computation.")] = Precision.BFLOAT16,
    reduce: Annotated[Precision, typer.Option(help="Gradient reduction.")] = Precision.BFLOAT16,
    optimizer: Annotated[Optimizer, typer.Option(help="Update rule.")] = Optimizer.ADAMW,
    optimizer_impl: Annotated[
        OptimizerImpl, typer.Option(help="How AdamW and SGD run.")
    ] = OptimizerImpl.FUSED,
    optimizer_in_backward: Annotated[
        bool, typer.Option(help="Apply each gradient at once, so that none is kept.")
    ] = False,
    activation_checkpointing: Annotated[
        bool, typer.Option(help="Recompute each layer in backward.")
    ] = True,
    attention: Annotated[
        Attention, typer.Option(help="sdpa is a fused kernel; math and eager keep scores.")
    ] = Attention.SDPA,
    attention_mask: Annotated[
        bool, typer.Option(help="Whether an explicit mask is materialised.")
    ] = True,
    sharding: Annotated[Sharding, typer.Option(help="What is divided.")] = Sharding.FULL,
    shard_ranks: Annotated[
        int | None, typer.Option(help="Ranks of one group, for hybrid sharding.")
    ] = None,
    wrap: Annotated[Wrap, typer.Option(help="Sharding units.")] = Wrap.LAYER,
    embedding: Annotated[
        Embedding, typer.Option(help="In the root unit, or a unit of its own.")
    ] = Embedding.ROOT,
    prefetch: Annotated[Prefetch, typer.Option(help="FSDP1's in backward.")] = Prefetch.NONE,
    fsdp: Annotated[
        int | None,
        typer.Option(min=1, max=2, help="Generation; by the installed torch where left out."),
    ] = None,
    offload: Annotated[Offload, typer.Option(help="What lives on the host.")] = Offload.NONE,
    loading: Annotated[
        Loading, typer.Option(help="Who holds the whole checkpoint while loading.")
    ] = Loading.SLICED,
    heads: Annotated[
        str | None, typer.Option(help="Classes of each classifier head, like 3,7.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Plan a distillation: the teacher beside this student.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for machines.")] = False,
) -> None:
    """Compute what a job takes before it runs: the peak on each rank, by phase and by component."""
    try:
        shape = load(model, heads=_classes(heads))
        hardware = _hardware(
            device,
            ranks=ranks,
            device_memory=device_memory,
            host_memory=host_memory,
            reserve=reserve,
        )
        recipe = Recipe(
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
        )
        planned, offered, refused = _plan(shape, recipe, hardware, teacher, heads)
    except InvalidInput as error:
        _refuse(error, as_json=as_json)
    if as_json:
        documents = [[a.to_json() for a in some] for some in (offered, refused)]
        typer.echo(json.dumps(planned.to_json(*documents), indent=2))
        return
    show_plan(Console(), planned, offered, refused)


def _plan(
    shape: Shape, recipe: Recipe, hardware: Hardware, teacher: str | None, heads: str | None
) -> tuple[Plan, tuple[Alternative, ...], tuple[Alternative, ...]]:
    """Return the plan, what would fit if it does not comfortably, and what the host refuses."""
    if teacher is not None:
        beside = load(teacher, heads=_classes(heads))
        return plan_distillation(beside, shape, hardware, student_recipe=recipe), (), ()
    planned = plan_job(shape, recipe, hardware)
    if planned.runs and planned.verdict is Verdict.FITS:
        return planned, (), ()
    offered = alternatives(shape, recipe, hardware)
    return planned, offered, refused_by_host(shape, recipe, hardware)


def _hardware(
    device: str,
    *,
    ranks: int,
    device_memory: str | None,
    host_memory: str | None,
    reserve: str | None,
) -> Hardware:
    kind = find_device(device)
    host = parse_size(host_memory, field="host_memory") if host_memory else host_memory_bytes()
    memory = parse_size(device_memory, field="device_memory") if device_memory else None
    if kind.name == "cpu" and memory is None and host is not None:
        memory = host // max(ranks, 1)  # the ranks' device is the host, which they share
    return machine(
        kind.name,
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
        major, minor = metadata.version("torch").split(".")[:2]
    except metadata.PackageNotFoundError:
        return Engine.FSDP2
    # fully_shard became public in torch 2.6.
    return Engine.FSDP2 if (int(major), int(minor)) >= (2, 6) else Engine.FSDP1


def _refuse(error: InvalidInput, *, as_json: bool) -> Any:
    problem = {"field": error.field, "problem": error.problem, "accepted": error.accepted}
    if as_json:
        typer.echo(json.dumps({"error": problem}))
    typer.echo(f"stillhouse plan: {error}", err=True)
    raise typer.Exit(_INVALID_INPUT)
