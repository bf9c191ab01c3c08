"""The exported directory is an ordinary model that answers as the training model did."""

from __future__ import annotations

import pytest

from tests.training.rank_checks import Measured


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (60_000, 3)])
def test_automodel_gives_the_same_logits(
    measured: Measured, engine: str, shard_bytes: int, files: int
) -> None:
    found = measured("exported_model")[f"{engine} {shard_bytes}"]
    assert found["class"] == "Qwen3Model"
    assert found["missing"] == 0
    assert found["unexpected"] == ["score.weight"]
    assert found["refused"]
    assert found["files"] == files
    assert found["size"] > 0.1
    assert found["difference"] < 1e-5
