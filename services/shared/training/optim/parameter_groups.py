"""Which parameters decay: groups of local shards with the same weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.shared.training.sharding.shard import LocalShard


@dataclass
class ParameterGroup:
    """Shards with the same weight decay."""

    shards: list[LocalShard]
    weight_decay: float


def decay_groups(shards: Sequence[LocalShard], weight_decay: float) -> list[ParameterGroup]:
    """Return matrices with weight decay; norms and biases (one dimension) without."""
    return [
        ParameterGroup([shard for shard in shards if len(shard.shape) > 1], weight_decay),
        ParameterGroup([shard for shard in shards if len(shard.shape) <= 1], 0.0),
    ]
