"""Placement of a distillation's teacher on the ranks, as planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.shared.jobs.errors import DoesNotFit
from services.shared.jobs.planning.model_shapes import Teacher
from services.shared.jobs.planning.spec_to_plan import JobPlan, machine_of, plan_job
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import DistillSpec, Recipe, job_spec
from services.shared.memory.architecture import shape
from services.shared.memory.errors import InvalidInput
from services.shared.memory.recipe import Engine

SETTINGS = JobSettings(
    database_url="postgresql+psycopg:///x", broker_url="redis://x", data_dir=Path()
)


def asked(teacher: str = "qwen3-8b", placement: str = "auto", **changes: Any) -> DistillSpec:
    spec = {
        "kind": "distill",
        "dataset_id": "ds_1",
        "teacher": {"path": teacher},
        "student": {"path": "qwen3-0.6b"},
        "distillation": {"teacher_placement": placement},
        "training": {"batch_size": 64, "micro_batch_tokens": 512},
        "resources": {"ranks": 8, "device": "k100_ai", "host_memory": "500GiB"},
    }
    found = job_spec.validate_python(spec | changes)
    assert isinstance(found, DistillSpec)
    return found


def planned(spec: DistillSpec, *, unshardable: bool = False) -> JobPlan:
    """Plan the distillation of a preset, named as its teacher's path."""
    assert spec.teacher.path is not None
    return plan_job(
        spec,
        model=shape.from_preset("qwen3-0.6b", heads=[3]),
        teacher=Teacher(shape.from_preset(spec.teacher.path, heads=[3]), unshardable=unshardable),
        machine=machine_of(spec, SETTINGS),
        engine=Engine.FSDP2,
    )


SMALL = {"ranks": 8, "device": "k100_ai", "device_memory": "12GiB", "host_memory": "500GiB"}
LONG = {"batch_size": 64, "micro_batch_tokens": 65_536, "max_length": 8192}
FIXED: dict[str, Any] = {"recipe": Recipe().model_dump(mode="json")}


@pytest.mark.parametrize(
    ("teacher", "placement"), [("qwen3-0.6b", "replicated"), ("qwen3-32b", "sharded")]
)
def test_a_teacher_is_replicated_where_that_fits_according_to_the_plan(
    teacher: str, placement: str
) -> None:
    found = planned(asked(teacher)).plan
    assert found["teacher_placement"] == placement
    assert found["verdict"] == "fits"


def test_a_placement_that_the_spec_names_is_kept() -> None:
    whole, cut = (planned(asked(placement=how)).plan for how in ("replicated", "sharded"))
    assert (whole["teacher_placement"], cut["teacher_placement"]) == ("replicated", "sharded")
    assert whole["peak_bytes"] > cut["peak_bytes"]


def test_a_refusal_names_the_cheapest_change_that_fits() -> None:
    with pytest.raises(DoesNotFit, match="It fits with: shard the teacher over all ranks") as no:
        planned(asked("qwen3-32b", "replicated", **FIXED))
    first = no.value.plan["alternatives"][0]
    assert first["changes"] == {"teacher_placement": "sharded"}
    assert first["peak_bytes"] == planned(asked("qwen3-32b", "sharded")).plan["peak_bytes"]


def test_auto_does_not_move_a_teacher_that_the_spec_has_placed() -> None:
    chosen = planned(asked("qwen3-32b", "replicated"))
    assert chosen.plan["alternatives"][0]["changes"] == {"teacher_placement": "sharded"}
    assert chosen.plan["teacher_placement"] == "replicated"
    assert chosen.recipe.offload == "all"  # all that remains possible with 60 GiB of teacher


def test_auto_takes_a_smaller_micro_batch_for_both_models() -> None:
    """Eight texts of 8192 tokens at once are too many on 12 GiB."""
    with pytest.raises(DoesNotFit):
        planned(asked(resources=SMALL, training=LONG, **FIXED))
    chosen = planned(asked(resources=SMALL, training=LONG))
    assert chosen.recipe.micro_batch_tokens is not None
    assert chosen.recipe.micro_batch_tokens < LONG["micro_batch_tokens"]
    assert chosen.plan["verdict"] == "fits"
    assert chosen.plan["components"]["other_model"] > 0
    # Planned again with the chosen recipe, it is the same plan.
    own = chosen.recipe.model_dump(mode="json")
    placement = chosen.plan["teacher_placement"]
    again = planned(asked("qwen3-8b", placement, resources=SMALL, training=LONG, recipe=own))
    assert again.plan["peak_bytes"] == chosen.plan["peak_bytes"]


def test_a_replicated_student_is_offered_to_be_sharded() -> None:
    """Replicas of the student and a share of the teacher are a little too much."""
    whole = Recipe(sharding="none").model_dump(mode="json")
    with pytest.raises(DoesNotFit, match="It fits with: shard fully over all ranks") as refused:
        planned(asked("qwen3-8b", "sharded", resources=SMALL, recipe=whole))
    assert refused.value.plan["alternatives"][0]["changes"] == {"sharding": "full"}


def test_every_alternative_counts_the_teacher() -> None:
    with pytest.raises(DoesNotFit) as refused:
        planned(asked("qwen3-32b", "replicated", **FIXED))
    share = 2 * shape.from_preset("qwen3-32b").num_parameters // 8
    offered = refused.value.plan["alternatives"]
    assert len(offered) > 1
    assert all(alternative["peak_bytes"] > share for alternative in offered)


def test_a_teacher_that_cannot_be_sharded_stays_replicated() -> None:
    found = planned(asked("qwen3-32b", allow_overcommit=True), unshardable=True).plan
    assert found["teacher_placement"] == "replicated"
    assert all("teacher_placement" not in a["changes"] for a in found["alternatives"])


def test_sharding_a_teacher_that_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(InvalidInput, match="made elsewhere cannot be sharded; accepted: replic"):
        planned(asked(placement="sharded"), unshardable=True)
