"""Checks of sharding on two ranks; `test_shard.py` asserts what they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from services.shared.model.classifier import build_classifier, build_config
from services.shared.training import memory_probe
from services.shared.training.optim.optimizer import build_optimizer
from services.shared.training.process import World
from services.shared.training.sharding.load import initialise
from services.shared.training.sharding.shard import (
    shard_classifier,
)
from tests.training.rank_checks import check
from tests.training.rank_training import (
    ENGINES,
    HEADS,
    TEXTS,
    TOKENS,
    VOCABULARY,
    furthest,
    loss_of,
    made,
    model_config,
    plain_training,
    recipe,
    texts,
    train,
    training,
    whole,
)


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
def buffers_are_real(world: World, directory: Path) -> Any:
    sharded = made(world, recipe())
    real = build_classifier(model_config(), HEADS)
    return {
        name: torch.equal(values, dict(real.named_buffers())[name])
        for name, values in sharded.classifier.named_buffers()
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
            torch.autograd.backward(loss)
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
