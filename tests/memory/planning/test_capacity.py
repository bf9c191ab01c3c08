"""The fewest devices for a model, and the largest model for devices, agree with the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.shared.memory.architecture.shape import Shape, from_preset
from services.shared.memory.hardware import Hardware, machine
from services.shared.memory.planning.alternatives import Alternative
from services.shared.memory.planning.capacity import fewest_ranks, largest_models, to_dict
from services.shared.memory.planning.plan import plan
from services.shared.memory.recipe import Offload, Recipe

RECIPE = Recipe(attention_mask=False)


def shape_of(name: str) -> Shape:
    return from_preset(name, heads=(3, 7))


def planned(fit: Alternative, hardware: Hardware, *, ranks: int) -> bool:
    recipe = RECIPE.with_changes(fit.changes)
    return plan(fit.plan.shape, recipe, replace(hardware, ranks=ranks)).runs


@pytest.mark.parametrize("name", ["qwen3-32b", "llama-3-8b", "bert-base", "qwen3-30b-a3b"])
def test_one_device_less_does_not_hold_the_job(name: str) -> None:
    hardware = machine("k100_ai", ranks=8)
    fits = fewest_ranks(shape_of(name), RECIPE, hardware)
    assert fits
    for fit in fits:
        assert planned(fit, hardware, ranks=fit.plan.hardware.ranks)
        assert fit.plan.hardware.ranks == 1 or not planned(
            fit, hardware, ranks=fit.plan.hardware.ranks - 1
        )


def test_32b_on_k100_cards_needs_nine_as_it_is_and_fewer_with_less_state() -> None:
    fits = fewest_ranks(shape_of("qwen3-32b"), RECIPE, machine("k100_ai", ranks=8))
    assert [(fit.plan.hardware.ranks, fit.lossless) for fit in fits] == [
        (9, True),
        (7, True),
        (4, False),  # an exact master and 8-bit moments
        (3, False),  # a master of 24 bits
    ]
    assert [fit.changes.get("optimizer") for fit in fits] == [
        None,
        None,
        "adamw_8bit",
        "adamw_split24",
    ]
    assert all(fit.plan.recipe.offload is Offload.NONE for fit in fits)


def test_each_further_recipe_needs_fewer_devices_than_those_before() -> None:
    ranks = [
        fit.plan.hardware.ranks
        for fit in fewest_ranks(shape_of("qwen2.5-72b"), RECIPE, machine("h100", ranks=8))
    ]
    assert ranks == sorted(set(ranks), reverse=True)


def test_a_model_that_no_number_of_devices_holds_has_no_answer() -> None:
    small = machine("k100_ai", ranks=8, device_memory_bytes=2 * 2**30, reserve_bytes=2**30)
    assert fewest_ranks(shape_of("qwen3-32b"), RECIPE, small) == []


def test_the_largest_model_is_the_largest_that_the_plan_accepts() -> None:
    shapes = [shape_of(name) for name in ("qwen3-0.6b", "qwen3-8b", "qwen3-14b", "qwen3-32b")]
    hardware = machine("k100_ai", ranks=4)
    found = largest_models(shapes, RECIPE, hardware)
    assert [shape.name for shape, _ in found] == ["qwen3-14b", "qwen3-32b"]
    assert [fit.lossless for _, fit in found] == [True, False]
    as_given = [s for s in shapes if plan(s, RECIPE, hardware).runs]
    assert max(as_given, key=lambda shape: shape.num_parameters).name == "qwen3-14b"


def test_a_fit_counts_nodes_of_so_many_devices() -> None:
    fit = fewest_ranks(shape_of("qwen3-32b"), RECIPE, machine("k100_ai", ranks=8))[0]
    document = to_dict(fit, devices_per_node=4)
    assert (document["ranks"], document["nodes"], document["model"]) == (9, 3, "qwen3-32b")
    assert document["peak_bytes"] <= document["budget_bytes"]
