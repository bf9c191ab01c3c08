"""Weights come from the files, each rank its part, or the run does not start."""

from __future__ import annotations

import pytest

from tests.training.rank_checks import Measured


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "bf16"])
def test_weights_from_four_files_are_those_saved(measured: Measured, engine: str) -> None:
    found = measured("pretrained_weights")
    assert found["files"] == 4
    assert found[engine]


def test_loading_takes_no_more_of_the_host_than_a_chunk_beyond_the_shards(
    measured: Measured,
) -> None:
    found = measured("host_memory_of_loading")
    assert found["files"] == 4
    assert found["whole"] > 200 * 2**20
    assert found["beyond"] < 1.5 * found["unit"] + 300 * 2**20


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("pickled", "convert them to safetensors"),
        ("none", "no model.safetensors"),
        ("cut", "is truncated"),
        ("shape", "the model expects [63, 33]"),
        ("missing", "hold no tensor for parameter 'layers.2.self_attn.q_proj.weight'"),
    ],
)
def test_weights_that_cannot_be_used_are_refused_with_the_reason(
    measured: Measured, case: str, words: str
) -> None:
    found = measured("weights_that_are_refused")[case]
    assert found["reason"] == "bad_model"
    assert words in found["message"]


def test_a_parameter_that_nothing_filled_never_trains(measured: Measured) -> None:
    found = measured("unfilled_parameter_is_found")
    assert found["reason"] == "bad_model"
    assert "embed_tokens.weight" in found["message"]


def test_first_weights_depend_on_the_seed_alone(measured: Measured) -> None:
    found = measured("first_weights")
    assert found["equal"]
    assert found["differs_by_seed"]
    assert found["layers_differ"]


def test_first_weights_are_drawn_as_the_architecture_draws_them(measured: Measured) -> None:
    found = measured("first_weights")
    assert found["std"] == pytest.approx(0.02, rel=0.1)
    assert found["norms"] == 1.0
    assert found["padding_row"] == 0.0
