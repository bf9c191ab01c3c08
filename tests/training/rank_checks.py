"""What two gloo ranks measure for the tests of this directory; rank 0 writes results.json.

A check is a function of the world and a directory; it runs on both ranks and returns JSON.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModel

from services.shared.datasets.card import Head
from services.shared.jobs.run_directory import MemoryRecord, RunDirectory, read_records, write_json
from services.shared.jobs.spec import Recipe, Training
from services.shared.memory.recipe import Engine
from services.shared.model.classifier import build_classifier, build_config
from services.shared.training import memory_probe
from services.shared.training.checkpoint import checkpoint
from services.shared.training.memory_probe import MemoryProbe
from services.shared.training.optim.optimizer import Optimizer, build_optimizer
from services.shared.training.process import Position, RunFailed, World, join, leave
from services.shared.training.sharding import load
from services.shared.training.sharding import shard as shard_module
from services.shared.training.sharding.export import export_weights
from services.shared.training.sharding.load import initialise, load_pretrained
from services.shared.training.sharding.shard import (
    Sharded,
    default_engine,
    parameter_dtype,
    shard_classifier,
)

Check = Callable[[World, Path], Any]
CHECKS: dict[str, Check] = {}
HEADS = [Head(name="a", labels=["x", "y", "z"]), Head(name="b", labels=["n", "p"])]
VOCABULARY, TEXTS, TOKENS = 301, 8, 9  # 301 rows do not divide by two ranks
HERE = default_engine()
ENGINES = sorted({Engine.FSDP1, HERE})


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def model_config(**fields: Any) -> Any:
    shape = {
        "model_type": "qwen3",
        "hidden_size": 33,  # odd, so that FSDP1's flat shards start within rows
        "intermediate_size": 57,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
    }
    return build_config(shape | fields, vocab_size=VOCABULARY, pad_token_id=0)


def recipe(**changes: Any) -> Recipe:
    plain = {"compute": "float32", "reduce": "float32", "optimizer_impl": "for_loop"}
    return Recipe.model_validate(plain | changes)


def training(**changes: Any) -> Training:
    return Training.model_validate({"weight_decay": 0.1, "max_grad_norm": None} | changes)


def empty(world: World, chosen: Recipe, engine: Engine, **fields: Any) -> Sharded:
    with torch.device("meta"):
        classifier = build_classifier(model_config(**fields), HEADS, dtype=parameter_dtype(chosen))
    return shard_classifier(classifier, chosen, world, engine=engine)


def made(world: World, chosen: Recipe, engine: Engine = HERE, seed: int = 0) -> Sharded:
    sharded = empty(world, chosen, engine)
    initialise(sharded, seed=seed)
    return sharded


def texts(step: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (TEXTS, TOKENS), generator=draw)
    return ids, torch.arange(TEXTS) % 3, torch.arange(TEXTS) % 2


def loss_of(module: Any, step: int, rows: slice) -> Tensor:
    ids, a, b = texts(step)
    logits = module(ids[rows])
    total = torch.nn.functional.cross_entropy(logits["a"], a[rows], reduction="sum")
    total = total + torch.nn.functional.cross_entropy(logits["b"], b[rows], reduction="sum")
    return total / TEXTS


def train(
    sharded: Sharded, optimizer: Optimizer, world: World, *, steps: range, parts: int = 1
) -> list[float]:
    """Take some steps on the texts, each rank its share in `parts` micro-batches."""
    losses = []
    sharded.module.train()
    for step in steps:
        total = 0.0
        for part in range(parts):
            rows = slice(world.rank * parts + part, None, world.size * parts)
            loss = loss_of(sharded.module, step, rows)
            optimizer.before_backward(learning_rate=1e-2, step=step, part=part, parts=parts)
            (loss * world.size).backward()
            total += float(loss.detach())
        optimizer.step()
        losses += world.sum([total])
    return losses


def whole(sharded: Sharded, values: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return every parameter (or what is cut like it) whole, on every rank."""
    result = {}
    for shard in sharded.shards:
        full = torch.zeros(shard.num_elements, dtype=torch.float32)
        local = shard.local if values is None else values.get(shard.name)
        if local is not None:
            full[shard.start : shard.stop] = local.float()
        if not sharded.replicated:
            dist.all_reduce(full)
        result[shard.name] = full.view(shard.shape)
    return result


def plain(weights: dict[str, Tensor]) -> Any:
    """Return an ordinary single-process classifier with these weights."""
    classifier = build_classifier(model_config(), HEADS)
    classifier.load_state_dict(weights, strict=True)
    return classifier.train()


def plain_training(
    weights: dict[str, Tensor], make: Callable[[Any], torch.optim.Optimizer], steps: range
) -> tuple[list[float], dict[str, Tensor]]:
    classifier = plain(weights)
    optimizer = make(
        [
            {"params": [p for p in classifier.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in classifier.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
    )
    losses = []
    for step in steps:
        loss = loss_of(classifier, step, slice(None))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in classifier.named_parameters()}


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def failure(action: Callable[[], Any]) -> dict[str, str]:
    try:
        action()
    except RunFailed as error:
        return {"reason": str(error.reason), "message": str(error)}
    return {"reason": "none", "message": ""}


@check
def engines_follow_plain_training(world: World, directory: Path) -> Any:
    """Losses and final weights against one process, for every engine and kind of sharding."""
    found = {}
    for engine in ENGINES:
        for sharding, parts in (("full", 1), ("full", 2), ("grad_op", 2), ("none", 2)):
            sharded = made(world, recipe(sharding=sharding), engine)
            first = whole(sharded)
            optimizer = build_optimizer(sharded, training(), world)
            losses = train(sharded, optimizer, world, steps=range(3), parts=parts)
            expected, weights = plain_training(
                first, lambda g: torch.optim.AdamW(g, lr=1e-2), range(3)
            )
            found[f"{engine} {sharding} {parts}"] = {
                "loss": max(abs(x - y) for x, y in zip(losses, expected, strict=True)),
                "weights": furthest(whole(sharded), weights),
                "moved": furthest(first, weights),
            }
    return found


@check
def units_and_bytes(world: World, directory: Path) -> Any:
    found = {}
    for engine in ENGINES:
        for name, changes in {
            "own": {},
            "root embedding": {"embedding": "root"},
            "one unit": {"wrap": "root"},
            "replicated": {"sharding": "none"},
        }.items():
            sharded = made(world, recipe(**changes), engine)
            found[f"{engine} {name}"] = memory_probe.observe_sharding(sharded, world)
    return found


@check
def first_weights(world: World, directory: Path) -> Any:
    """The same from one seed for every engine and cut, and as the architecture draws them."""
    all_of = {
        f"{engine} {sharding}": whole(made(world, recipe(sharding=sharding), engine))
        for engine in ENGINES
        for sharding in ("full", "none")
    }
    one = all_of[f"{HERE} full"]
    other_seed = whole(made(world, recipe(), seed=1))
    layer = one["backbone.layers.0.mlp.up_proj.weight"]
    return {
        "equal": all(same(one, other) for other in all_of.values()),
        "differs_by_seed": not same(one, other_seed),
        "layers_differ": not torch.equal(layer, one["backbone.layers.1.mlp.up_proj.weight"]),
        "std": float(layer.std()),
        "norms": float(one["backbone.norm.weight"].min()),
        "padding_row": float(one["backbone.embed_tokens.weight"][0].abs().max()),
    }


@check
def buffers_are_real(world: World, directory: Path) -> Any:
    sharded = made(world, recipe())
    real = build_classifier(model_config(), HEADS)
    return {
        name: torch.equal(values, dict(real.named_buffers())[name])
        for name, values in sharded.classifier.named_buffers()
    }


@check
def rules_follow_plain_optimizers(world: World, directory: Path) -> Any:
    found = {}
    cases: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
        "adamw fused": (
            {"optimizer_impl": "fused"},
            lambda g: torch.optim.AdamW(g, lr=1e-2, fused=True),
        ),
        "adamw foreach": (
            {"optimizer_impl": "foreach"},
            lambda g: torch.optim.AdamW(g, lr=1e-2, foreach=True),
        ),
        "adamw on host": (
            {"offload": "optimizer"},
            lambda g: torch.optim.AdamW(g, lr=1e-2),
        ),
        "sgd": ({"optimizer": "sgd"}, lambda g: torch.optim.SGD(g, lr=1e-2)),
        "adafactor": ({"optimizer": "adafactor"}, lambda g: torch.optim.Adafactor(g, lr=1e-2)),
    }
    for name, (changes, make) in cases.items():
        for engine in ENGINES:
            sharded = made(world, recipe(**changes), engine)
            first = whole(sharded)
            optimizer = build_optimizer(sharded, training(), world)
            losses = train(sharded, optimizer, world, steps=range(4))
            expected, weights = plain_training(first, make, range(4))
            found[f"{engine} {name}"] = {
                "loss": max(abs(x - y) for x, y in zip(losses, expected, strict=True)),
                "weights": furthest(whole(sharded), weights),
                "moved": furthest(first, weights),
            }
    return found


@check
def small_state_learns_like_fp32(world: World, directory: Path) -> Any:
    found = {}
    for name in ("adamw", "adamw_bf16", "adamw_8bit"):
        for engine in ENGINES:
            sharded = made(world, recipe(optimizer=name), engine)
            optimizer = build_optimizer(sharded, training(), world)
            losses = train(sharded, optimizer, world, steps=range(12))
            state = [t for s in optimizer.rule.state().values() for t in s.values() if t.ndim]
            found[f"{engine} {name}"] = {
                "losses": losses,
                "parameters": sorted({str(p.local.dtype) for p in sharded.shards}),
                "state": sorted({str(t.dtype) for t in state}),
                "state_bytes": sum(t.nbytes for t in state),
                "elements": sum(p.stop - p.start for p in sharded.shards),
            }
    return found


@check
def backward_is_bit_equal(world: World, directory: Path) -> Any:
    """AdamW applied within the backward pass against AdamW at the end of the step."""
    found = {}
    for engine in ENGINES:
        for sharding in ("full", "none"):
            for parts in (1, 2):
                results, gradients = [], 0
                for in_backward in (False, True):
                    chosen = recipe(
                        sharding=sharding,
                        optimizer_in_backward=in_backward,
                        optimizer_impl="fused",
                    )
                    sharded = made(world, chosen, engine)
                    optimizer = build_optimizer(sharded, training(), world)
                    losses = train(sharded, optimizer, world, steps=range(2), parts=parts)
                    if in_backward:
                        gradients = gradients_after_backward(sharded, optimizer, world)
                    else:
                        train(sharded, optimizer, world, steps=range(2, 3))
                    results.append((losses, whole(sharded)))
                (one, first), (other, second) = results
                found[f"{engine} {sharding} {parts}"] = {
                    "losses_equal": one == other,
                    "weights_equal": same(first, second),
                    "gradients_left": gradients,
                }
    return found


def gradients_after_backward(sharded: Sharded, optimizer: Optimizer, world: World) -> int:
    """Take a third step and count what is left before `step` is called."""
    loss = loss_of(sharded.module, 2, slice(world.rank, None, world.size))
    optimizer.before_backward(learning_rate=1e-2, step=2, part=0, parts=1)
    (loss * world.size).backward()
    left = sum(shard.parameter.grad is not None for shard in sharded.shards)
    optimizer.step()
    return left


@check
def clipping(world: World, directory: Path) -> Any:
    """The norm of one SGD update with rate 1 and no decay is that of the clipped gradient."""
    found = {}
    for engine in ENGINES:
        for in_backward in (False, True):
            for parts in (1, 2):
                chosen = recipe(optimizer="sgd", optimizer_in_backward=in_backward)
                sharded = made(world, chosen, engine)
                before = whole(sharded)
                limits = training(max_grad_norm=0.05, weight_decay=0)
                optimizer = build_optimizer(sharded, limits, world)
                for part in range(parts):
                    rows = slice(world.rank * parts + part, None, world.size * parts)
                    loss = loss_of(sharded.module, 0, rows)
                    optimizer.before_backward(learning_rate=1.0, step=0, part=part, parts=parts)
                    (loss * world.size).backward()
                norm = optimizer.step()
                after = whole(sharded)
                update = sum(float((after[n] - before[n]).square().sum()) for n in after)
                found[f"{engine} {in_backward} {parts}"] = {
                    "norm": norm,
                    "update": math.sqrt(update),
                }
    reference = plain(before)
    loss_of(reference, 0, slice(None)).backward()
    squares = sum(float(p.grad.square().sum()) for p in reference.parameters())
    return {"cases": found, "true_norm": math.sqrt(squares)}


@check
def infinite_gradient_stops(world: World, directory: Path) -> Any:
    found = {}
    for in_backward in (False, True):
        chosen = recipe(optimizer_in_backward=in_backward)
        sharded = made(world, chosen)
        optimizer = build_optimizer(sharded, training(max_grad_norm=1.0), world)
        before = whole(sharded)

        def step(sharded: Sharded = sharded, optimizer: Optimizer = optimizer) -> None:
            loss = loss_of(sharded.module, 0, slice(None)) * float("inf")
            optimizer.before_backward(learning_rate=1e-2, step=0, part=0, parts=1)
            loss.backward()
            optimizer.step()

        found[str(in_backward)] = failure(step) | {"untouched": same(before, whole(sharded))}
    return found


def write_checkpoint(directory: Path, *, files: int = 1, prefix: str = "", seed: int = 3) -> Any:
    """Write an ordinary Hugging Face directory and return its model."""
    torch.manual_seed(seed)
    backbone = build_classifier(model_config(), HEADS).backbone
    size = sum(p.numel() for p in backbone.parameters()) * 4
    shards = size if files == 1 else int(size / files * 1.05)
    if dist.get_rank() == 0:
        backbone.save_pretrained(str(directory), max_shard_size=shards)
    dist.barrier()
    return backbone


@check
def pretrained_weights(world: World, directory: Path) -> Any:
    backbone = write_checkpoint(directory / "four", files=4)
    found = {"files": len(list((directory / "four").glob("*.safetensors")))}
    expected = {f"backbone.{n}": p.detach() for n, p in backbone.named_parameters()}
    for engine in ENGINES:
        sharded = empty(world, recipe(), engine)
        load_pretrained(sharded, directory / "four", seed=0)
        loaded = {n: v for n, v in whole(sharded).items() if n.startswith("backbone.")}
        found[str(engine)] = same(expected, loaded)
    bf16 = empty(world, recipe(optimizer="adamw_bf16"), HERE)
    load_pretrained(bf16, directory / "four", seed=0)
    rounded = {n: v.bfloat16().float() for n, v in expected.items()}
    loaded = {n: v for n, v in whole(bf16).items() if n.startswith("backbone.")}
    found["bf16"] = same(rounded, loaded)
    return found


@check
def host_memory_of_loading(world: World, directory: Path) -> Any:
    """Resident bytes at the highest while loading four files, beyond the rank's own parameters."""
    fields = {"hidden_size": 768, "intermediate_size": 6144, "num_hidden_layers": 4}
    if world.is_first:
        torch.manual_seed(0)
        backbone = build_classifier(model_config(**fields), HEADS).backbone
        size = sum(p.numel() for p in backbone.parameters()) * 4
        backbone.save_pretrained(str(directory), max_shard_size=size * 10 // 35)
        del backbone
    world.barrier()
    sharded = empty(world, recipe(), HERE, **fields)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew (man 5 proc)
    before = _status("VmRSS")
    load_pretrained(sharded, directory, seed=0)
    return {
        "files": len(list(directory.glob("*.safetensors"))),
        "beyond": _status("VmHWM")
        - before
        - memory_probe.storage_bytes(shard.local for shard in sharded.shards),
        "unit": max(unit.num_elements for unit in sharded.units) * 4,
        "whole": sharded.num_parameters * 4,
    }


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@check
def weights_that_are_refused(world: World, directory: Path) -> Any:
    write_checkpoint(directory / "good")
    for name in ("pickled", "none", "cut", "other"):
        if world.is_first:
            (directory / name).mkdir()
    if world.is_first:
        (directory / "pickled" / "pytorch_model.bin").write_bytes(b"never read")
        good = (directory / "good" / "model.safetensors").read_bytes()
        (directory / "cut" / "model.safetensors").write_bytes(good[: len(good) // 2])
    world.barrier()
    found = {}
    for name in ("pickled", "none", "cut"):
        sharded = empty(world, recipe(), HERE)
        found[name] = failure(lambda s=sharded, n=name: load_pretrained(s, directory / n, seed=0))
    wider = empty(world, recipe(), HERE, intermediate_size=63)
    found["shape"] = failure(lambda: load_pretrained(wider, directory / "good", seed=0))
    deeper = empty(world, recipe(), HERE, num_hidden_layers=3)
    found["missing"] = failure(lambda: load_pretrained(deeper, directory / "good", seed=0))
    return found


@check
def unfilled_parameter_is_found(world: World, directory: Path) -> Any:
    """The loader skips one parameter, as ZeRO's persistent parameters once were."""
    write_checkpoint(directory / "good")
    true_put = load._put

    def put(shard: Any, values: Tensor, at: int, sums: Any) -> None:
        if shard.name.endswith("embed_tokens.weight"):
            sums.add(shard.name, values, at=at)
            return
        true_put(shard, values, at, sums)

    sharded = empty(world, recipe(), HERE)
    for shard in sharded.shards:
        shard.local.fill_(7.0)
    load._put = put  # type: ignore[assignment]
    try:
        return failure(lambda: load_pretrained(sharded, directory / "good", seed=0))
    finally:
        load._put = true_put


@check
def unsharded_model_is_stopped(world: World, directory: Path) -> Any:
    """Sharding is asked for, but on this stack the call does nothing."""
    name = "_fsdp2" if HERE is Engine.FSDP2 else "_fsdp1"
    true_wrap = getattr(shard_module, name)
    true_find = shard_module._local_shards_fsdp1

    def do_nothing(classifier: Any, *_: Any) -> Any:
        return classifier.to_empty(device="cpu")

    setattr(shard_module, name, do_nothing)
    shard_module._local_shards_fsdp1 = shard_module._local_shards_fsdp2
    try:
        sharded = made(world, recipe())
    finally:
        setattr(shard_module, name, true_wrap)
        shard_module._local_shards_fsdp1 = true_find
    run = RunDirectory(directory)
    probe = MemoryProbe(run, world, Position())
    found = failure(lambda: probe.check_sharding(sharded))
    world.barrier()
    records = [r for _, r in read_records(run.memory_file(0), MemoryRecord)]
    return found | {"observed": records[0].observed}


@check
def one_coarse_rank_stops_all(world: World, directory: Path) -> Any:
    """Rank 1 has wrapped the root only: rank 0 must stop too, though it did as planned."""
    sharded = made(world, recipe())
    if world.rank == 1:
        sharded.units.append(sharded.units[0])  # it believes in one unit more than there is
    probe = MemoryProbe(RunDirectory(directory), world, Position())
    return failure(lambda: probe.check_sharding(sharded))


@check
def checkpoints(world: World, directory: Path) -> Any:
    """Save after two steps, go on for two; restore elsewhere, go on: the same to the bit."""
    found = {}
    for engine in ENGINES:
        for name, changes in {
            "adamw": {"optimizer_impl": "fused"},
            "adamw_bf16": {"optimizer": "adamw_bf16"},
            "adamw_8bit": {"optimizer": "adamw_8bit"},
            "adafactor": {"optimizer": "adafactor"},
            "in backward": {"optimizer_in_backward": True},
        }.items():
            if engine is Engine.FSDP1 and name == "in backward":
                changes = changes | {"sharding": "grad_op"}
            sharded = made(world, recipe(**changes), engine)
            optimizer = build_optimizer(sharded, training(), world)
            train(sharded, optimizer, world, steps=range(1))
            place = directory / f"{engine} {name}"
            path = checkpoint.save(
                place, sharded, optimizer, world, job_id="j", step=1, loop={"x": 1}
            )
            losses = train(sharded, optimizer, world, steps=range(1, 3))
            again = made(world, recipe(**changes), engine, seed=9)
            second = build_optimizer(again, training(), world)
            saved = checkpoint.restore(path, again, second)
            relosses = train(again, second, world, steps=range(1, 3))
            found[f"{engine} {name}"] = {
                "losses_equal": losses == relosses,
                "weights_equal": same(whole(sharded), whole(again)),
                "loop": saved.loop,
                "pickles": [p.name for p in place.rglob("*") if p.suffix in (".pt", ".metadata")],
            }
    return found


@check
def checkpoints_change_hands(world: World, directory: Path) -> Any:
    """What two ranks saved in halves, replicas and the other engine read whole."""
    found = {}
    for name in ("adamw", "adamw_8bit"):
        sharded = made(world, recipe(optimizer=name))
        optimizer = build_optimizer(sharded, training(), world)
        train(sharded, optimizer, world, steps=range(2))
        place = directory / name
        path = checkpoint.save(place, sharded, optimizer, world, job_id="j", step=2, loop={})
        expected = train(sharded, optimizer, world, steps=range(2, 4))
        for engine, sharding in ((HERE, "none"), (Engine.FSDP1, "full")):
            other = made(world, recipe(optimizer=name, sharding=sharding), engine, seed=9)
            second = build_optimizer(other, training(), world)
            checkpoint.restore(path, other, second)
            losses = train(other, second, world, steps=range(2, 4))
            apart = max(abs(x - y) for x, y in zip(losses, expected, strict=True))
            found[f"{name} {sharding}"] = apart
    return found


@check
def damaged_checkpoints(world: World, directory: Path) -> Any:
    sharded = made(world, recipe())
    optimizer = build_optimizer(sharded, training(), world)
    train(sharded, optimizer, world, steps=range(1))
    found: dict[str, Any] = {}
    for name in ("bits", "short", "missing"):
        path = checkpoint.save(
            directory / name, sharded, optimizer, world, job_id="j", step=1, loop={}
        )
        file = path / "rank-00001.safetensors"
        if world.is_first and name == "bits":
            data = bytearray(file.read_bytes())
            data[-5] ^= 1
            file.write_bytes(data)
        if world.is_first and name == "short":
            file.write_bytes(file.read_bytes()[:-8])
        if world.is_first and name == "missing":
            file.unlink()
        world.barrier()
        found[name] = failure(lambda p=path: checkpoint.restore(p, sharded, optimizer))
    path = checkpoint.save(directory / "o", sharded, optimizer, world, job_id="j", step=1, loop={})
    sgd = made(world, recipe(optimizer="sgd"))
    second = build_optimizer(sgd, training(), world)
    found["optimizer"] = failure(lambda: checkpoint.restore(path, sgd, second))
    wider = empty(world, recipe(), HERE, intermediate_size=63)
    found["model"] = failure(lambda: checkpoint.restore(path, wider, None))
    return found


@check
def crash_while_saving(world: World, directory: Path) -> Any:
    """Rank 1's disk is full in the middle of its file: the last good checkpoint must stay."""
    sharded = made(world, recipe())
    checkpoint.save(directory, sharded, None, world, job_id="j", step=1, loop={})
    true_writer = checkpoint.TensorWriter

    class FullDisk(true_writer):  # type: ignore[valid-type,misc]
        def append(self, values: Tensor) -> None:
            if world.rank == 1 and len(self._left) < 10:
                raise OSError(28, "No space left on device")
            super().append(values)

    checkpoint.TensorWriter = FullDisk  # type: ignore[misc]
    error = ""
    try:
        checkpoint._write_rank(directory, sharded, None, world.rank)
    except OSError as fault:
        error = str(fault)
    finally:
        checkpoint.TensorWriter = true_writer  # type: ignore[misc]
    left = [p.name for p in directory.glob("rank-*")]
    world.barrier()
    latest = checkpoint.latest(directory)
    assert latest is not None
    checkpoint.restore(latest, sharded, None)
    return {
        "errors": world.sum([float("No space" in error)]),
        "latest": latest.name,
        "left": sorted(left),
    }


@check
def retention(world: World, directory: Path) -> Any:
    sharded = made(world, recipe())
    for step in (1, 2, 10, 11):
        checkpoint.save(directory, sharded, None, world, job_id="j", step=step, loop={})
        checkpoint.retain(directory, 2, world)
    world.barrier()
    return sorted(path.name for path in directory.iterdir())


@check
def exported_model(world: World, directory: Path) -> Any:
    """Logits of the training model against those of what AutoModel loads."""
    found = {}
    ids, _, _ = texts(0)
    for engine in ENGINES:
        for shard_bytes in (10**9, 60_000):
            place = directory / f"{engine} {shard_bytes}"
            sharded = made(world, recipe(), engine)
            optimizer = build_optimizer(sharded, training(), world)
            train(sharded, optimizer, world, steps=range(2))
            sharded.module.eval()
            with torch.no_grad():
                ours = sharded.module(ids)
            sharded.reshard()
            export_weights(sharded, place, world, shard_bytes=shard_bytes)
            found[f"{engine} {shard_bytes}"] = compare_export(place, ids, ours)
    return found


def compare_export(place: Path, ids: Tensor, ours: dict[str, Tensor]) -> Any:
    from safetensors.torch import load_file

    backbone, info = AutoModel.from_pretrained(str(place), output_loading_info=True)
    heads = load_file(place / "classifier_heads.safetensors")
    with torch.no_grad():
        state = backbone(ids).last_hidden_state[:, -1]
        theirs = {
            h.name: state @ heads[f"{h.name}.weight"].T + heads[f"{h.name}.bias"] for h in HEADS
        }
    return {
        "difference": max(float((ours[n] - theirs[n]).abs().max()) for n in theirs),
        "size": max(float(v.abs().max()) for v in theirs.values()),
        "missing": len(info["missing_keys"]) + len(info["unexpected_keys"]),
        "files": len(list(place.glob("model*.safetensors"))),
        "class": type(backbone).__name__,
    }


@check
def mixed_precision(world: World, directory: Path) -> Any:
    """bf16 compute and reduction on fp32 parameters, layers recomputed or not."""
    curves = {}
    for engine in ENGINES:
        for again in (False, True):
            chosen = recipe(compute="bfloat16", reduce="bfloat16", activation_checkpointing=again)
            sharded = made(world, chosen, engine)
            optimizer = build_optimizer(sharded, training(), world)
            curves[f"{engine} {again}"] = train(sharded, optimizer, world, steps=range(3))
    sharded = made(world, recipe())
    optimizer = build_optimizer(sharded, training(), world)
    curves["float32"] = train(sharded, optimizer, world, steps=range(3))
    return curves


ARCHITECTURES = {
    "llama": {},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},
    "bert": {},
    "xlm-roberta": {"max_position_embeddings": 64},
    "modernbert": {},
    "distilbert": {},
}


@check
def architectures(world: World, directory: Path) -> Any:
    """A sharded model started on meta answers as an ordinary one with the same weights."""
    found = {}
    for kind, fields in ARCHITECTURES.items():
        shape: dict[str, Any] = {
            "model_type": kind,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        if kind == "distilbert":
            shape = {"model_type": kind, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
        if kind in ("llama", "gemma3_text"):
            shape["num_key_value_heads"] = 2
        config = build_config(shape | fields, vocab_size=VOCABULARY, pad_token_id=0)
        for engine in ENGINES:
            with torch.device("meta"):
                classifier = build_classifier(config, HEADS)
            sharded = shard_classifier(classifier, recipe(), world, engine=engine)
            initialise(sharded, seed=0)
            ordinary = build_classifier(config, HEADS)
            ordinary.load_state_dict(whole(sharded), strict=False)
            ids, _, _ = texts(0)
            mask = (torch.arange(TOKENS) < torch.arange(2, 2 + TEXTS)[:, None]).long()
            with torch.no_grad():
                ours = sharded.module.eval()(ids, mask)
                theirs = ordinary.eval()(ids, mask)
            sharded.reshard()
            loss = loss_of(sharded.module.train(), 0, slice(None))
            loss.backward()
            found[f"{engine} {kind}"] = {
                "difference": max(float((ours[n] - theirs[n]).abs().max()) for n in ours),
                "size": max(float(v.abs().max()) for v in theirs.values()),
                "without_gradient": [
                    p.name for p in sharded.shards if p.gradient() is None and p.stop > p.start
                ],
            }
    return found


@check
def recomputed_layers(world: World, directory: Path) -> Any:
    """Recomputing activations changes no number."""
    found = []
    for again in (False, True):
        sharded = made(world, recipe(activation_checkpointing=again))
        optimizer = build_optimizer(sharded, training(), world)
        found.append(train(sharded, optimizer, world, steps=range(2)))
    return found


def main() -> None:
    root = Path(sys.argv[1])
    wanted = sys.argv[2:] or list(CHECKS)
    world = join(RunDirectory(root), device="cpu", seed=0)
    for name in wanted:
        began = time.monotonic()
        directory = root / name
        directory.mkdir(exist_ok=True)
        world.barrier()
        try:
            result = CHECKS[name](world, directory)
        except Exception:
            # The other rank may wait in a collective for ever: end both, with the first error.
            path = root / f"{name}.json"
            if not path.exists():
                write_json(path, {"error": traceback.format_exc()})
            raise
        if world.is_first:
            write_json(root / f"{name}.json", {"result": result})
            print(f"{time.monotonic() - began:6.2f} s {name}", flush=True)
    leave()


if __name__ == "__main__":
    main()
