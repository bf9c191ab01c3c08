"""The exported directory is an ordinary model that answers as the training model did."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (60_000, 3)])
def test_automodel_gives_the_same_logits(measured, engine, shard_bytes, files):
    found = measured("exported_model")[f"{engine} {shard_bytes}"]
    assert found["class"] == "Qwen3Model"
    assert found["missing"] == 0
    assert found["files"] == files
    assert found["size"] > 0.1
    assert found["difference"] < 1e-5
