"""Small models and training runs that the rank checks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.shared.datasets.card import Head
from services.shared.jobs.spec import Recipe, Training
from services.shared.memory.recipe import Engine
from services.shared.model.classifier import build_classifier, build_config
from services.shared.training.optim.optimizer import Optimizer
from services.shared.training.process import RunFailed, World
from services.shared.training.sharding.load import initialise
from services.shared.training.sharding.shard import (
    Sharded,
    default_engine,
    parameter_dtype,
    shard_classifier,
)

HEADS = [Head(name="a", labels=["x", "y", "z"]), Head(name="b", labels=["n", "p"])]
VOCABULARY, TEXTS, TOKENS = 301, 8, 9  # 301 rows do not divide by two ranks
HERE = default_engine()
ENGINES = sorted({Engine.FSDP1, HERE})


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
            torch.autograd.backward(loss * world.size)
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
        torch.autograd.backward(loss)
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
