"""From a spec to its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.shared.jobs.errors import DoesNotFit
from services.shared.jobs.planning.model_shapes import shape_of
from services.shared.jobs.planning.spec_to_plan import (
    JobPlan,
    engine_of,
    machine_of,
    plan_job,
    to_spec_changes,
)
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import Recipe, TeacherSpec, Training, job_spec
from services.shared.memory.architecture import shape
from services.shared.memory.recipe import Engine
from services.shared.memory.recipe import Recipe as MemoryRecipe

GOLDEN = {
    "kind": "teacher",
    "dataset_id": "ds_1",
    "model": {"path": "Qwen3-32B"},
    "training": {"batch_size": 8, "micro_batch_tokens": 2048, "max_length": 2048},
    "resources": {"ranks": 8, "device": "k100_ai", "host_memory": "125GiB"},
}


def settings(**values: Any) -> JobSettings:
    return JobSettings(
        database_url="postgresql+psycopg:///x", broker_url="redis://x", data_dir=Path(), **values
    )


def golden(**changes: object) -> TeacherSpec:
    spec = job_spec.validate_python(GOLDEN | changes)
    assert isinstance(spec, TeacherSpec)
    return spec


def planned(spec: TeacherSpec) -> JobPlan:
    model = shape.from_preset("qwen3-32b", heads=[3, 7])
    machine = machine_of(spec, settings())
    return plan_job(spec, model=model, teacher=None, machine=machine, engine=Engine.FSDP2)


def test_the_published_recipe_is_refused_with_its_plan_and_what_would_fit() -> None:
    spec = golden(recipe=Recipe().model_dump(mode="json"))
    with pytest.raises(DoesNotFit) as refusal:
        planned(spec)
    assert refusal.value.plan["verdict"] == "does_not_fit"
    assert refusal.value.plan["peak_bytes"] > refusal.value.plan["budget_bytes"]
    assert any(
        a["changes"] == {"optimizer_in_backward": True} for a in refusal.value.plan["alternatives"]
    )
    assert "It fits with: apply the optimizer in backward" in str(refusal.value)


def test_overcommit_admits_the_job_and_keeps_the_plan() -> None:
    spec = golden(recipe=Recipe().model_dump(mode="json"), allow_overcommit=True)
    assert planned(spec).plan["verdict"] == "does_not_fit"


def test_auto_applies_the_lossless_change() -> None:
    chosen = planned(golden())
    assert chosen.recipe.optimizer_in_backward
    assert chosen.recipe.optimizer == "adamw"
    assert chosen.plan["verdict"] == "fits"


def test_auto_changes_nothing_that_already_fits() -> None:
    spec = golden(training={"batch_size": 8, "max_length": 256})
    model = shape.from_preset("qwen3-0.6b", heads=[2])
    machine = machine_of(spec, settings())
    chosen = plan_job(spec, model=model, teacher=None, machine=machine, engine=Engine.FSDP2)
    assert chosen.recipe == Recipe(compute="bfloat16", reduce="bfloat16")


def test_a_smaller_micro_batch_becomes_a_token_budget() -> None:
    base = MemoryRecipe(micro_batch=8, sequence_length=256)
    changes = to_spec_changes({"micro_batch": 2, "accumulate": 4}, base)
    assert changes == {"micro_batch_tokens": 512}
    recipe = Recipe(**changes)
    assert recipe.token_budget(Training(micro_batch_tokens=2048)) == 512


def test_a_change_that_the_ranks_do_not_support_is_not_offered() -> None:
    assert to_spec_changes({"engine": "fsdp1"}, MemoryRecipe()) is None


def test_ranks_on_a_cpu_share_the_memory_of_the_host() -> None:
    spec = golden(resources={"ranks": 4, "device": "cpu", "host_memory": "16GiB"})
    machine = machine_of(spec, settings())
    assert machine.device.memory_bytes == 4 * 2**30
    assert machine.host_memory_bytes is None


def test_the_settings_define_the_host_memory_where_the_spec_does_not() -> None:
    spec = golden(resources={"ranks": 8, "device": "k100_ai"})
    machine = machine_of(spec, settings(host_memory="125GB"))
    assert machine.host_memory_bytes == 125 * 10**9
    assert machine_of(spec, settings()).host_memory_bytes is None


def test_a_trained_tokenizer_decides_the_vocabulary() -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    model = {"config": config, "tokenizer": {"train": True, "vocab_size": 1000}}
    spec = golden(model=model)
    small = shape_of(spec.model, directory=None, classes=[2])
    assert small.embedding.elements == 64 * 1000


def test_the_engine_is_that_of_the_settings_or_of_the_installed_torch() -> None:
    assert engine_of(settings(engine="fsdp1")) is Engine.FSDP1
    assert engine_of(settings()) in (Engine.FSDP1, Engine.FSDP2)


def test_a_recipe_that_computes_in_float32_is_planned_with_all_its_alternatives() -> None:
    recipe = Recipe(compute="float32", reduce="float32")
    spec = golden(recipe=recipe.model_dump(mode="json"), allow_overcommit=True)
    offered = planned(spec).plan["alternatives"]
    assert any(a["changes"].get("compute") == "bfloat16" for a in offered)
