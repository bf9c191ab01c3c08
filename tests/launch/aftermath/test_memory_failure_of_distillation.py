"""A distillation that ran out of memory: what its plan, which has both models, would change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.shared.jobs.resolved_spec import ResolvedSpec, ResolvedTeacher
from services.shared.jobs.run_directory import Failure, RunDirectory
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import DistillSpec, Recipe
from services.shared.jobs.state import Reason
from services.shared.jobs.views import Claim
from services.shared.launch.aftermath.memory_failure import examine_memory
from services.shared.launch.aftermath.outcome import MemoryFailure, RootCause
from services.shared.memory.architecture.hf_config import config_of
from services.shared.memory.architecture.shape import from_preset
from tests.factories import SENTIMENT, plan_document

MESSAGE = (
    "HIP out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 63.98 GiB of "
    "which 12.00 MiB is free. Of the allocated memory 59.36 GiB is allocated by PyTorch, and "
    "1.10 GiB is reserved by PyTorch but unallocated."
)
LONG = {"max_length": 4096, "micro_batch_tokens": 65_536, "batch_size": 128}


def claim_of(
    tmp_path: Path, *, teacher: str, placement: str | None, recipe: Recipe, **spec: Any
) -> Claim:
    """Return a claim on a distillation of two presets whose teacher was planned to lie so."""
    places = {"teacher": teacher, "student": "qwen3-0.6b"}
    for place, preset in places.items():
        (tmp_path / place).mkdir()
        config = json.dumps(config_of(from_preset(preset).dims))
        (tmp_path / place / "config.json").write_text(config)
        header = b"{}"  # of weights, only the names would be read
        whole = len(header).to_bytes(8, "little") + header
        (tmp_path / place / "model.safetensors").write_bytes(whole)
    (tmp_path / "teacher" / "heads.json").write_text("{}")
    asked = {
        "kind": "distill",
        "dataset_id": "ds_1",
        "teacher": {"model_id": "mdl_teacher"},
        "student": {"path": "student"},
        "recipe": recipe.model_dump(mode="json"),
        "resources": {"ranks": 8, "device": "k100_ai", "host_memory": "1024GiB"},
    }
    distill_spec = DistillSpec.model_validate(asked | spec)
    return Claim(
        job_id="job_1",
        attempt=1,
        token="t",
        spec=distill_spec,
        recipe=recipe.model_dump(mode="json"),
        plan=None if placement is None else plan_document(teacher_placement=placement),
        model_id="mdl_1",
        resolved=ResolvedSpec(
            distill_spec,
            heads=(SENTIMENT,),
            dataset_dir=tmp_path / "ds",
            model_dir=tmp_path / "student",
            teacher=ResolvedTeacher(tmp_path / "teacher"),
        ),
        resume_dir=None,
        problem=None,
    )


def examine(tmp_path: Path, claim: Claim) -> MemoryFailure:
    settings = JobSettings(
        database_url="postgresql://nowhere/none", broker_url="redis://nowhere", data_dir=tmp_path
    )
    failure = Failure(
        time=0,
        rank=0,
        phase="forward",
        step=2,
        reason=Reason.DEVICE_OUT_OF_MEMORY,
        message=MESSAGE,
    )
    cause = RootCause(Reason.DEVICE_OUT_OF_MEMORY, MESSAGE, 0, failure, log=MESSAGE)
    run = RunDirectory(tmp_path / "run")
    return examine_memory(cause, claim=claim, run=run, settings=settings, exit_code=1)


def test_a_replicated_teacher_is_sharded_for_the_next_attempt(
    tmp_path: Path,
) -> None:
    claim = claim_of(tmp_path, teacher="qwen3-32b", placement="replicated", recipe=Recipe())
    found = examine(tmp_path, claim)
    assert found.has_remedy
    assert found.recipe_changes == {}  # it is the plan that places the teacher
    assert found.plan is not None
    assert (found.plan["teacher_placement"], found.plan["verdict"]) == ("sharded", "fits")
    assert found.diagnosis is not None
    first = next(r for r in found.diagnosis["remedies"] if r["changes"])
    assert first["changes"] == {"teacher_placement": "sharded"}
    assert first["predicted_peak_bytes"] == found.plan["peak_bytes"]


def test_a_sharded_teacher_stays_sharded_and_both_get_smaller_micro_batches(
    tmp_path: Path,
) -> None:
    claim = claim_of(
        tmp_path, teacher="qwen3-8b", placement="sharded", recipe=Recipe(), training=LONG
    )
    found = examine(tmp_path, claim)
    assert set(found.recipe_changes) == {"micro_batch_tokens"}
    tokens = found.recipe_changes["micro_batch_tokens"]
    assert isinstance(tokens, int)
    assert tokens < LONG["micro_batch_tokens"]
    assert found.plan is not None
    assert (found.plan["teacher_placement"], found.plan["verdict"]) == ("sharded", "fits")
    share = 2 * from_preset("qwen3-8b", heads=[2]).num_parameters // 8
    assert found.plan["components"]["other_model"] == pytest.approx(share, rel=0.001)


def test_the_remedies_of_a_second_failure_are_new(tmp_path: Path) -> None:
    """The attempt that failed now is the one that the first remedy gave."""
    recipe = Recipe(micro_batch_tokens=LONG["max_length"])
    claim = claim_of(
        tmp_path, teacher="qwen3-32b", placement="sharded", recipe=recipe, training=LONG
    )
    found = examine(tmp_path, claim)
    now = recipe.model_dump(mode="json")
    assert found.diagnosis is not None
    offered = [r["changes"] for r in found.diagnosis["remedies"] if r["verdict"] == "fits"]
    assert offered
    for changes in offered:
        assert "teacher_placement" not in changes
        assert all(now[name] != value for name, value in changes.items())


def test_the_message_of_a_distillation_is_not_attributed_to_a_model(tmp_path: Path) -> None:
    claim = claim_of(tmp_path, teacher="qwen3-8b", placement="sharded", recipe=Recipe())
    found = examine(tmp_path, claim).diagnosis
    assert found is not None
    assert found["message"] is not None
    assert found["message"]["requested_bytes"] == 96 * 2**20
    assert found["request"] == []
    assert found["confidence"] != "certain"
