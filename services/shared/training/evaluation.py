"""Running a sharded classifier over a whole split, the result on every rank.

Legend: N texts of the split, C classes of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from services.shared.datasets.card import Head
from services.shared.model.batches import plan_evaluation
from services.shared.model.calibration import Calibration
from services.shared.model.metrics import Array, head_metrics, predict
from services.shared.model.objective import supervised_loss
from services.shared.model.tokens import TokenisedSplit, collate
from services.shared.training.process import World
from services.shared.training.sharding.shard import Sharded


@torch.no_grad()
def predict_split(
    sharded: Sharded,
    split: TokenisedSplit,
    heads: Sequence[Head],
    world: World,
    *,
    budget_tokens: int,
    pad_id: int,
) -> dict[str, Array]:
    """Return float32 logits [N, C] by head, the same on every rank. All ranks must call this."""
    results = {
        head.name: torch.zeros(len(split), len(head.labels), device=world.device) for head in heads
    }
    sharded.module.eval()
    for step in plan_evaluation(split.lengths, budget_tokens=budget_tokens, ranks=world.size):
        (rows,) = step.micro_batches[world.rank]
        batch = collate(split, rows, pad_id).to(world.device)
        logits = sharded.module(*batch.inputs)
        if rows:
            for head in heads:
                results[head.name][list(rows)] = logits[head.name]
    sharded.reshard()
    for values in results.values():
        dist.all_reduce(values)
    return {name: values.cpu().numpy() for name, values in results.items()}


def predict_labels(
    logits: Mapping[str, Array],
    heads: Sequence[Head],
    calibration: Mapping[str, Calibration] | None = None,
) -> dict[str, Array]:
    """Return predictions by head (see `metrics.predict`), with the thresholds of `calibration`."""
    found = calibration or {}
    return {
        head.name: predict(
            head,
            logits[head.name],
            found.get(head.name, Calibration()).logit_thresholds(head),
        )
        for head in heads
    }


def evaluate(
    logits: Mapping[str, Array],
    split: TokenisedSplit,
    heads: Sequence[Head],
    calibration: Mapping[str, Calibration] | None = None,
) -> Any:
    """Return `{"heads": {name: metrics}, "macro_f1": mean over heads, "loss": mean over heads}`.

    Multi-label heads predict with the thresholds of `calibration`, or with 0.5 without.
    """
    table = {}
    losses = []
    predictions = predict_labels(logits, heads, calibration)
    for head in heads:
        labels = split.labels[head.name]
        metrics = head_metrics(head, predicted=predictions[head.name], labels=labels)
        table[head.name] = metrics.report()
        target = torch.from_numpy(labels)
        found = supervised_loss(
            {head.name: torch.from_numpy(logits[head.name])},
            {head.name: target.long() if target.ndim == 1 else target},
            [head],
        )[head.name]
        losses.append(float(found.total) / max(1, int(found.count)))
    return {
        "heads": table,
        "macro_f1": sum(entry["macro_f1"] for entry in table.values()) / len(table),
        "loss": sum(losses) / len(losses),
    }
