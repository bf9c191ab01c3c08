"""The rows of a trimmed vocabulary: each rank reads its part, wherever that begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from services.shared.training.sharding.load import Checksums, _fill_rows_from_file
from services.shared.training.sharding.safetensors_ranges import TensorFile
from services.shared.training.sharding.shard import LocalShard

ROWS, WIDTH = [0, 1, 4, 5, 6, 9], 3


def shard(start: int, stop: int) -> LocalShard:
    values = nn.Parameter(torch.full((stop - start,), float("nan")))
    local = values.detach()
    return LocalShard("embedding", (len(ROWS), WIDTH), start, stop, 0, values, local)


@pytest.mark.parametrize("cut", [0, 1, 7, 12, 18])
def test_two_ranks_hold_the_kept_rows_wherever_the_matrix_is_cut(tmp_path: Path, cut: int) -> None:
    whole = torch.randn(10, WIDTH)
    save_file({"words": whole}, tmp_path / "model.safetensors")
    parts, sums = [shard(0, cut), shard(cut, len(ROWS) * WIDTH)], [Checksums(), Checksums()]
    with TensorFile(tmp_path / "model.safetensors") as file:
        for part, own in zip(parts, sums, strict=True):
            _fill_rows_from_file(part, file, "words", ROWS, own)
            if part.local.numel():
                own.verify([part])
    assert torch.equal(torch.cat([part.local for part in parts]), whole[ROWS].flatten())


def test_rows_that_the_file_does_not_have_are_refused(tmp_path: Path) -> None:
    save_file({"words": torch.zeros(9, WIDTH)}, tmp_path / "model.safetensors")
    with (
        TensorFile(tmp_path / "model.safetensors") as file,
        pytest.raises(ValueError, match=r"of which 6 rows up to 9"),
    ):
        _fill_rows_from_file(shard(0, 18), file, "words", ROWS, Checksums())
