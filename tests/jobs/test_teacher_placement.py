"""How a distillation's teacher lies on the ranks, as planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.shared.jobs.planning import JobPlan, machine_of, plan_job
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import job_spec
from services.shared.memory import shape
from services.shared.memory.recipe import Engine

SETTINGS = JobSettings(
    database_url="postgresql+psycopg:///x", broker_url="redis://x", data_dir=Path()
)


def planned(teacher: str, placement: str = "auto") -> JobPlan:
    spec = job_spec.validate_python(
        {
            "kind": "distill",
            "dataset_id": "ds_1",
            "teacher": {"path": teacher},
            "student": {"path": "qwen3-0.6b"},
            "distillation": {"teacher_placement": placement},
            "training": {"batch_size": 8, "micro_batch_tokens": 512},
            "resources": {"ranks": 8, "device": "k100_ai", "host_memory": "500GiB"},
            "allow_overcommit": True,
        }
    )
    return plan_job(
        spec,
        model=shape.from_preset("qwen3-0.6b", heads=[3]),
        teacher=shape.from_preset(teacher, heads=[3]),
        machine=machine_of(spec, SETTINGS),
        engine=Engine.FSDP2,
    )


@pytest.mark.parametrize(
    ("teacher", "placement"), [("qwen3-0.6b", "replicated"), ("qwen3-32b", "sharded")]
)
def test_a_teacher_is_replicated_where_the_plan_says_that_it_fits(
    teacher: str, placement: str
) -> None:
    found = planned(teacher).plan
    assert found["teacher_placement"] == placement
    assert found["verdict"] == "fits"


def test_a_placement_that_the_spec_names_is_kept() -> None:
    whole, cut = planned("qwen3-8b", "replicated").plan, planned("qwen3-8b", "sharded").plan
    assert (whole["teacher_placement"], cut["teacher_placement"]) == ("replicated", "sharded")
    assert whole["peak_bytes"] > cut["peak_bytes"]
