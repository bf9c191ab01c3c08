"""Dry run of a training step: the exact peaks of one rank by phase, at any size, without the memory.

    python -m services.shared.training.dry_run.trace REQUEST.json...
    torchrun --nproc-per-node 2 -m services.shared.training.dry_run.trace REQUEST.json... --real

The model is built, sharded and stepped by the code that trains, in the order of the trainer's loop; a
distillation runs its teacher before each forward pass, as the distiller's loop does (its loss on the
logits, a few numbers for each text, is left out). With `--real` the same runs with values on gloo
ranks, and must give the same peaks. What a dry run cannot see: the kernels that an accelerator would
choose, their workspaces, the collectives' buffers, fragmentation.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, PretrainedConfig

from services.shared.datasets.card import Head
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.spec import Recipe, Training
from services.shared.memory.recipe import Engine
from services.shared.model.classifier import Classifier, build_classifier
from services.shared.model.objective import combined_loss
from services.shared.model.tokens import Batch, TokenisedSplit, collate
from services.shared.training.dry_run.fake_world import fake_world
from services.shared.training.dry_run.live_storage import LiveStorage, Origin, replaced
from services.shared.training.job_setup import inference_recipe, shard_model
from services.shared.training.optim.optimizer import Optimizer, build_optimizer, learning_rate
from services.shared.training.process import StopWatch, World, leave, make_deterministic, seed_step
from services.shared.training.sharding import shard as shard_module
from services.shared.training.sharding.load import initialise
from services.shared.training.sharding.shard import DTYPES, Sharded, default_engine

SHOWN_ORIGINS = 12
PAD_ID = 0


def _as_on_accelerators(recipe: Recipe) -> Recipe:
    compute = "bfloat16" if recipe.compute == "auto" else recipe.compute
    reduce = compute if recipe.reduce == "auto" else recipe.reduce
    return recipe.model_copy(update={"compute": compute, "reduce": reduce})


class TraceRequest(BaseModel):
    """A job to trace: `micro_batch` texts of `sequence_length` tokens, `accumulate` times a step.

    Number formats that its recipe leaves to the machine (`auto`) are those of accelerators.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: dict[str, Any] = Field(description="A transformers config, with model_type.")
    heads: list[int] = Field(min_length=1, description="Classes of each head.")
    recipe: Annotated[Recipe, AfterValidator(_as_on_accelerators)]
    engine: Engine | None = None
    ranks: int = Field(ge=1)
    micro_batch: int = Field(1, ge=1)
    sequence_length: int = Field(2048, ge=1)
    accumulate: int = Field(1, ge=1)
    padded: bool = Field(False, description="All texts of a micro-batch but one are shorter.")
    steps: int = Field(2, ge=1)
    teacher: dict[str, Any] | None = Field(None, description="The config of a frozen teacher.")
    teacher_heads: list[int] = []
    teacher_placement: Literal["sharded", "replicated"] = "sharded"


class TracedPhase(BaseModel):
    """The peak of one phase, and the largest request made in it."""

    phase: str
    step: int
    micro_batch: int
    peak_bytes: int
    request_bytes: int
    request: str


class Alive(BaseModel):
    """Storages of one origin that were alive at the peak."""

    what: str
    since: str  # the phase that made them
    count: int
    size_bytes: int


class Trace(BaseModel):
    """The memory of one rank; `alive` lists the storages alive at the peak, largest first."""

    rank: int
    engine: Engine
    torch: str
    real: bool
    seconds: float
    peak_bytes: int
    phases: list[TracedPhase]
    alive: list[Alive]


def trace(request: TraceRequest) -> Trace:
    """Return the trace of rank 0 from a dry run."""
    with fake_world(request.ranks) as world:
        return _trace(request, world, prepare=None)


def trace_on_ranks(requests: Sequence[TraceRequest]) -> list[Trace]:
    """Return the traces of real runs on this rank; torchrun's environment describes the ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    stopping = StopWatch(RunDirectory(Path()), rank=1)
    world = World(rank=rank, size=size, device=torch.device("cpu"), stopping=stopping)
    make_deterministic(seed=0)
    found = []
    for request in requests:
        if request.ranks != size:
            raise ValueError(f"{size} ranks run, the request needs {request.ranks}")
        found.append(_trace(request, world, prepare=lambda sharded: initialise(sharded, seed=0)))
    return found


@dataclass(frozen=True)
class _Run:
    request: TraceRequest
    world: World
    live: LiveStorage
    heads: list[Head]
    texts: TokenisedSplit


def _trace(
    request: TraceRequest, world: World, *, prepare: Callable[[Sharded], None] | None
) -> Trace:
    began = time.monotonic()
    config = _config(request.config)
    heads = _heads(request.heads)
    live = LiveStorage(real=prepare is not None)
    run = _Run(request, world, live, heads, _texts(request, heads, config.vocab_size))
    # A device mesh reads the values of its rank tensor, which stays on the host.
    mesh = replaced(shard_module, "init_device_mesh", _outside(init_device_mesh))
    with mesh, live.counting():
        with live.section("wrap"):
            sharded = shard_model(config, heads, request.recipe, world, engine=request.engine)
        teacher = None
        if request.teacher is not None:
            with live.section("load"):
                teacher = _teacher(request, world)
        for model in (sharded, teacher):
            if isinstance(model, Sharded) and prepare is not None:
                prepare(model)
        optimizer = build_optimizer(sharded, Training(), world)
        _train(run, sharded, optimizer, teacher)
        _evaluate(run, sharded)
    return _result(run, sharded.engine, real=prepare is not None, seconds=time.monotonic() - began)


def _train(
    run: _Run, sharded: Sharded, optimizer: Optimizer, teacher: Sharded | Classifier | None
) -> None:
    """Take the steps of the trainer's loop (trainer/finetune.py), its calls in its order."""
    request, world, live = run.request, run.world, run.live
    training = Training()
    counts = {
        head.name: request.micro_batch * request.accumulate * world.size for head in run.heads
    }
    for number in range(1, request.steps + 1):
        rate = learning_rate(number - 1, request.steps, training)
        seed_step(training.seed, number - 1, world.rank)
        sharded.module.train()
        loss_sum = torch.zeros((), device=world.device)
        for part in range(request.accumulate):
            batch = _device_batch(run)
            with live.section("forward", step=number, micro_batch=part):
                answers = None if teacher is None else _teacher_logits(teacher, batch)
                logits = sharded.module(batch.input_ids, batch.attention_mask)
                loss = combined_loss(logits, batch.labels, run.heads, counts, None)
            optimizer.before_backward(
                learning_rate=rate, step=number - 1, part=part, parts=request.accumulate
            )
            with live.section("backward", step=number, micro_batch=part):
                (loss * world.size).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
            del logits, loss, answers
        world.sum([float(loss_sum), *world.stopping.flags()])
        with live.section("optimizer_step", step=number):
            optimizer.step()


def _evaluate(run: _Run, sharded: Sharded) -> None:
    """Take one step of evaluation.predict_split."""
    sharded.module.eval()
    with torch.no_grad():
        batch = _device_batch(run)
        with run.live.section("evaluation", step=run.request.steps):
            sharded.module(batch.input_ids, batch.attention_mask)
            sharded.reshard()


@torch.no_grad()
def _teacher_logits(teacher: Sharded | Classifier, batch: Batch) -> dict[str, Tensor]:
    module = teacher.module if isinstance(teacher, Sharded) else teacher
    found: dict[str, Tensor] = module(batch.input_ids, batch.attention_mask)
    if isinstance(teacher, Sharded):
        teacher.reshard()
    return found


def _teacher(request: TraceRequest, world: World) -> Sharded | Classifier:
    """Return the teacher as distiller/teacher.py places it."""
    assert request.teacher is not None
    config, heads = _config(request.teacher), _heads(request.teacher_heads or request.heads)
    recipe = inference_recipe(request.recipe)
    if request.teacher_placement == "replicated":
        dtype = DTYPES[recipe.compute]
        whole = build_classifier(config, heads, attention=recipe.attention, dtype=dtype)
        return whole.requires_grad_(False).eval()
    teacher = shard_model(config, heads, recipe, world, engine=request.engine)
    teacher.module.requires_grad_(False)
    teacher.module.eval()
    return teacher


def _device_batch(run: _Run) -> Batch:
    """Return a micro-batch on the device: on a CPU, copies stand in for the transfer."""
    batch = collate(run.texts, range(run.request.micro_batch), PAD_ID).to(run.world.device)
    mask = batch.attention_mask
    return replace(
        batch,
        input_ids=batch.input_ids.clone(),
        attention_mask=None if mask is None else mask.clone(),
        labels={name: values.clone() for name, values in batch.labels.items()},
        weight=batch.weight.clone(),
    )


def _texts(request: TraceRequest, heads: list[Head], vocabulary: int) -> TokenisedSplit:
    """Return the texts of one micro-batch, at random from a fixed seed."""
    draw = np.random.default_rng(0)
    lengths = np.full(request.micro_batch, request.sequence_length)
    if request.padded:
        lengths[1:] -= 1
    return TokenisedSplit(
        flat=draw.integers(1, vocabulary, int(lengths.sum()), dtype=np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        lines=np.arange(request.micro_batch),
        labels={head.name: np.zeros(request.micro_batch, np.int32) for head in heads},
        truncated=0,
    )


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function outside of all modes, with real tensors that are not counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _heads(classes: list[int]) -> list[Head]:
    return [
        Head(name=f"head_{i}", labels=[str(label) for label in range(count)])
        for i, count in enumerate(classes)
    ]


def _config(mapping: dict[str, Any]) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(**mapping)
    return config


def _result(run: _Run, engine: Engine, *, real: bool, seconds: float) -> Trace:
    phases = [
        TracedPhase(
            phase=section.phase,
            step=section.step,
            micro_batch=section.micro_batch,
            peak_bytes=peak.live_bytes,
            request_bytes=peak.request_bytes,
            request=_label(peak.request) if peak.request else "",
        )
        for section, peak in run.live.peaks.items()
    ]
    return Trace(
        rank=run.world.rank,
        engine=engine,
        torch=torch.__version__,
        real=real,
        seconds=round(seconds, 1),
        peak_bytes=max(phase.peak_bytes for phase in phases),
        phases=phases,
        alive=[
            Alive(what=_label(origin), since=origin.phase, count=count, size_bytes=size)
            for origin, count, size in run.live.alive_at_peak[:SHOWN_ORIGINS]
        ],
    )


def _label(origin: Origin) -> str:
    operator = origin.operator.removesuffix(".default")
    return f"{operator} {list(origin.shape)} {origin.dtype}"


def main(arguments: list[str]) -> None:
    """Print the trace of each request file as a line of JSON; of a real run, that of rank 0."""
    files = [Path(argument) for argument in arguments if argument != "--real"]
    requests = [TraceRequest.model_validate_json(file.read_bytes()) for file in files]
    really = "--real" in arguments
    if not really and default_engine() is Engine.FSDP1:
        raise SystemExit(
            f"A dry run needs torch 2.6 or later, and this is {torch.__version__}: its collectives "
            "have no shapes without values. A real run of a small model (--real) can be traced."
        )
    for found in trace_on_ranks(requests) if really else map(trace, requests):
        if found.rank == 0:
            sys.stdout.write(found.model_dump_json() + "\n")
    if really:
        leave()


if __name__ == "__main__":
    main(sys.argv[1:])
