from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.shared.jobs.planning.auto_choices import (
    num_numa_nodes,
    num_ranks,
    ranks_decisions,
    read_times,
    settle_recipe,
    write_times,
)
from services.shared.jobs.run_directory import LayerSize, MatmulTimes
from services.shared.jobs.spec import Recipe, Resources

SIZE = LayerSize(hidden=384, intermediate=1536)


def times(float32: float, bfloat16: float) -> MatmulTimes:
    return MatmulTimes(
        processor="Some CPU",
        threads=2,
        size=SIZE,
        tokens=256,
        float32_seconds=float32,
        bfloat16_seconds=bfloat16,
    )


@pytest.mark.parametrize(
    ("float32", "bfloat16", "value", "words"),
    [
        (
            1.0,
            5.6,
            "float32",
            "bfloat16 measured 5.6 times slower than float32 (Some CPU, 2 threads",
        ),
        (2.0, 1.0, "bfloat16", "bfloat16 measured 2.0 times faster"),
        (1.05, 1.0, "float32", "bfloat16 measured 1.1 times faster"),
    ],
)
def test_a_cpu_computes_in_the_format_that_it_multiplies_faster(
    float32: float, bfloat16: float, value: str, words: str
) -> None:
    recipe, (decision,) = settle_recipe(Recipe(), device="cpu", times=times(float32, bfloat16))
    assert (recipe.compute, recipe.reduce) == (value, value)
    assert (decision["value"], decision["basis"]) == (value, "measured")
    assert decision["why"].startswith(words)


@pytest.mark.parametrize("faster", [True, False])
def test_without_a_measurement_the_instruction_set_decides_for_the_plan(
    faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.shared.jobs.planning.auto_choices.bf16_is_faster", lambda: faster)
    recipe, (decision,) = settle_recipe(Recipe(), device="cpu", times=None)
    assert recipe.compute == ("bfloat16" if faster else "float32")
    assert decision["basis"] == "assumed"


@pytest.mark.parametrize("device", ["k100_ai", "a100-80"])
def test_accelerators_compute_in_bfloat16_as_before(device: str) -> None:
    recipe, decisions = settle_recipe(Recipe(), device=device, times=times(1.0, 9.0))
    assert (recipe.compute, recipe.reduce, decisions) == ("bfloat16", "bfloat16", [])


@pytest.mark.parametrize("fields", [{"parameters": "bfloat16"}, {"optimizer": "adamw_bf16"}])
def test_parameters_in_bfloat16_are_not_gathered_in_float32(fields: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(fields)
    settled, _ = settle_recipe(recipe, device="cpu", times=times(1.0, 9.0))
    assert settled.compute == "bfloat16"


def test_what_a_spec_names_is_kept() -> None:
    recipe = Recipe.model_validate({"compute": "float32", "reduce": "bfloat16"})
    assert settle_recipe(recipe, device="cpu", times=times(9.0, 1.0)) == (recipe, [])


def test_a_measurement_is_kept_for_layers_of_its_size(tmp_path: Path) -> None:
    directory = tmp_path / "processors"
    assert read_times(directory, SIZE) is None
    write_times(directory, times(1.0, 2.0))
    assert read_times(directory, SIZE) == times(1.0, 2.0)
    assert read_times(directory, LayerSize()) is None


def test_ranks_are_one_for_each_numa_node_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, cores in enumerate(("0-3", "4-7", "8-11")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {2, 3, 4})
    assert num_numa_nodes(tmp_path) == 2
    assert num_numa_nodes(tmp_path / "none") == 1


def test_ranks_of_accelerators_are_the_visible_devices() -> None:
    chosen = Resources(ranks="auto", device="k100_ai", visible_devices=[1, 2, 5])
    assert num_ranks(chosen) == 3
    assert num_ranks(Resources(ranks="auto", device="k100_ai")) == 2
    assert ranks_decisions(chosen) == []
    assert num_ranks(Resources(ranks=7)) == 7
