"""Checks of the export on two ranks; `test_export.py` asserts what they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification

from services.shared.training.optim.optimizer import build_optimizer
from services.shared.training.process import World
from services.shared.training.sharding.export import export_weights
from tests.training.rank_checks import check
from tests.training.rank_training import (
    ENGINES,
    HEADS,
    made,
    recipe,
    texts,
    train,
    training,
)


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
        "missing": len(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "refused": refused_as_classifier(place),
        "files": len(list(place.glob("model*.safetensors"))),
        "class": type(backbone).__name__,
    }


def refused_as_classifier(place: Path) -> bool:
    """Return whether transformers refuses to add its own, random head."""
    try:
        AutoModelForSequenceClassification.from_pretrained(str(place))
    except RuntimeError:
        return True
    return False
