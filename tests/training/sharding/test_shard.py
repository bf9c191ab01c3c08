"""Sharding follows the recipe, and trains like one process."""

from __future__ import annotations

import pytest

from tests.training.rank_checks import Measured

SHAPES = [
    "fsdp1 full 1",
    "fsdp1 full 2",
    "fsdp1 grad_op 2",
    "fsdp1 none 2",
    "fsdp2 full 1",
    "fsdp2 full 2",
    "fsdp2 grad_op 2",
    "fsdp2 none 2",
]


@pytest.mark.parametrize("case", SHAPES)
def test_two_ranks_follow_one_plain_process(measured: Measured, case: str) -> None:
    found = measured("engines_follow_plain_training")[case]
    assert found["moved"] > 0.02
    assert found["loss"] < 1e-6
    assert found["weights"] < 1e-5


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("layout", "units"),
    [("own", 4), ("root embedding", 3), ("one unit", 1), ("replicated", 4)],
)
def test_units_are_those_of_the_recipe(
    measured: Measured, engine: str, layout: str, units: int
) -> None:
    found = measured("units_and_bytes")[f"{engine} {layout}"]
    assert found["sharded_units"] == found["expected_units"] == units


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_a_rank_holds_half_of_the_model(measured: Measured, engine: str) -> None:
    found = measured("units_and_bytes")[f"{engine} own"]
    assert found["local_parameter_bytes"] < 0.52 * found["whole_model_bytes"]


def test_a_replica_holds_all_of_the_model(measured: Measured) -> None:
    found = measured("units_and_bytes")["fsdp1 replicated"]
    assert found["local_parameter_bytes"] >= found["whole_model_bytes"]


def test_buffers_of_a_meta_model_are_those_of_a_real_one(measured: Measured) -> None:
    found = measured("buffers_are_real")
    assert len(found) == 2
    assert all(found.values())


@pytest.mark.parametrize("case", ["fsdp1 False", "fsdp1 True", "fsdp2 False", "fsdp2 True"])
def test_bfloat16_compute_stays_near_float32(measured: Measured, case: str) -> None:
    curves = measured("mixed_precision")
    assert curves[case] == pytest.approx(curves["float32"], abs=0.02)
    assert curves[case] != curves["float32"]


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    "kind", ["llama", "gemma3_text", "bert", "xlm-roberta", "modernbert", "distilbert"]
)
def test_every_common_architecture_answers_sharded_as_it_does_whole(
    measured: Measured, engine: str, kind: str
) -> None:
    found = measured("architectures")[f"{engine} {kind}"]
    assert found["size"] > 0.1
    assert found["difference"] < 1e-5
    assert found["without_gradient"] == []


def test_recomputing_activations_changes_no_number(measured: Measured) -> None:
    kept, recomputed = measured("recomputed_layers")
    assert kept == recomputed
