"""A checkpoint is whole or not there, and continues to the bit."""

from __future__ import annotations

import pytest

from tests.training.rank_checks import Measured

RECIPES = [
    "adamw",
    "adamw_bf16",
    "adamw_8bit",
    "adamw_split",
    "adamw_split24",
    "adafactor",
    "in backward",
]


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_continues_to_the_bit(measured: Measured, engine: str, recipe: str) -> None:
    found = measured("checkpoints")[f"{engine} {recipe}"]
    assert found["losses_equal"]
    assert found["weights_equal"]
    assert found["loop"] == {"x": 1}


def test_nothing_is_pickled(measured: Measured) -> None:
    assert all(not found["pickles"] for found in measured("checkpoints").values())


@pytest.mark.parametrize("reader", ["none", "full"])
@pytest.mark.parametrize(
    ("optimizer", "allowed"), [("adamw", 1e-6), ("adamw_8bit", 1e-2), ("adamw_split", 1e-2)]
)
def test_another_layout_reads_what_two_ranks_saved(
    measured: Measured, optimizer: str, allowed: float, reader: str
) -> None:
    # Blocks of 8-bit moments begin elsewhere there, and are rounded once more.
    assert measured("checkpoints_change_hands")[f"{optimizer} {reader}"] < allowed


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("bits", "rank-00001.safetensors is damaged"),
        ("short", "rank-00001.safetensors has"),
        ("missing", "rank-00001.safetensors"),
        ("optimizer", "saved with optimizer adamw, the job uses sgd"),
        ("model", "is of another model"),
    ],
)
def test_damaged_and_foreign_checkpoints_are_refused_by_name(
    measured: Measured, case: str, words: str
) -> None:
    found = measured("damaged_checkpoints")[case]
    assert found["reason"] == "bad_checkpoint"
    assert words in found["message"]


def test_a_disk_that_fills_up_while_saving_leaves_the_last_good_checkpoint(
    measured: Measured,
) -> None:
    found = measured("crash_while_saving")
    assert found["errors"] == [1.0]
    assert found["latest"] == "step-00000001"
    assert "rank-00001.safetensors" not in found["left"]


def test_only_the_latest_checkpoints_are_kept(measured: Measured) -> None:
    assert measured("retention") == ["step-00000010", "step-00000011"]
