import json
from pathlib import Path
from typing import Any

import pytest

from services.shared.jobs.resolved_spec import ResolvedSpec
from services.shared.jobs.run_directory import Failure, RunDirectory
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import Recipe, TeacherSpec
from services.shared.jobs.state import Reason
from services.shared.jobs.views import Claim
from services.shared.launch.aftermath.memory_failure import examine_memory
from services.shared.launch.aftermath.outcome import MemoryFailure, RootCause
from tests.factories import SENTIMENT

QWEN3_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
# The published failure, in the words of torch 2.5.1 on HIP.
MESSAGE = (
    "HIP out of memory. Tried to allocate 932.00 MiB. GPU 0 has a total capacity of 63.98 GiB of "
    "which 512.00 MiB is free. Of the allocated memory 59.36 GiB is allocated by PyTorch, and "
    "1.10 GiB is reserved by PyTorch but unallocated."
)


ONE_TEXT = {"max_length": 2048, "micro_batch_tokens": 2048}  # in a rank's micro-batch


def _claim(tmp_path: Path, recipe: Recipe, **spec: Any) -> Claim:
    whole = {
        "kind": "teacher",
        "dataset_id": "ds_1",
        "model": {"config": QWEN3_32B, "tokenizer": {"train": True, "vocab_size": 151936}},
        "recipe": recipe.model_dump(mode="json"),
        "training": ONE_TEXT | {"batch_size": 8},
        "resources": {"ranks": 8, "device": "k100_ai", "host_memory": "1024GiB"},
    }
    teacher_spec = TeacherSpec.model_validate(whole | spec)
    return Claim(
        job_id="job_1",
        attempt=1,
        token="t",
        spec=teacher_spec,
        recipe=recipe.model_dump(mode="json"),
        plan=None,
        model_id="mdl_1",
        resolved=ResolvedSpec(teacher_spec, heads=(SENTIMENT,), dataset_dir=tmp_path / "ds"),
        resume_dir=None,
        problem=None,
    )


def _examine(tmp_path: Path, claim: Claim, failure: Failure | None, **cause: Any) -> MemoryFailure:
    settings = JobSettings(
        database_url="postgresql://nowhere/none", broker_url="redis://nowhere", data_dir=tmp_path
    )
    run = RunDirectory(tmp_path / "run")
    run.rank_dir(0).mkdir(parents=True)
    observed = {"sharded_units": 66, "local_parameter_bytes": 15_990_784_000}
    line = {"time": 0, "phase": "wrap", "allocated_bytes": 15_990_784_000, "observed": observed}
    run.memory_file(0).write_text(json.dumps(line) + "\n")
    root_cause = RootCause(Reason.DEVICE_OUT_OF_MEMORY, MESSAGE, 0, failure, **cause)
    return examine_memory(root_cause, claim=claim, run=run, settings=settings, exit_code=1)


@pytest.fixture
def failure() -> Failure:
    return Failure(
        time=0,
        rank=0,
        phase="backward",
        step=2,
        reason=Reason.DEVICE_OUT_OF_MEMORY,
        message=MESSAGE,
    )


def test_the_diagnosis_of_a_job_names_the_tensor_that_was_requested(
    tmp_path: Path, failure: Failure
) -> None:
    claim = _claim(tmp_path, Recipe())
    found = _examine(tmp_path, claim, failure, log=f"torch.OutOfMemoryError: {MESSAGE}").diagnosis
    assert found is not None
    assert found["sharded"] == "yes"
    assert found["message"] is not None
    assert found["message"]["requested_bytes"] == 932 * 2**20
    assert found["request"][0]["what"] == "one transformer layer as a flat buffer"


def test_the_first_remedy_that_fits_becomes_the_next_attempts_recipe(
    tmp_path: Path, failure: Failure
) -> None:
    recipe = Recipe()
    found = _examine(tmp_path, _claim(tmp_path, recipe), failure, log=MESSAGE)
    assert found.diagnosis is not None
    assert "fits" in {remedy["verdict"] for remedy in found.diagnosis["remedies"]}
    changed = Recipe.model_validate(recipe.model_dump() | found.recipe_changes)
    assert changed != recipe
    assert changed.optimizer_in_backward


def test_a_remedy_that_does_not_fit_by_the_jobs_own_plan_is_not_offered(
    tmp_path: Path, failure: Failure
) -> None:
    claim = _claim(tmp_path, Recipe(), training={"batch_size": 32} | ONE_TEXT)
    found = _examine(tmp_path, claim, failure, log=MESSAGE)
    # Four micro-batches a step accumulate: gradients have to be kept until the last.
    assert "optimizer_in_backward" not in found.recipe_changes
    assert found.plan is not None
    assert found.plan["verdict"] == "fits"


def test_every_change_of_a_remedy_is_new_and_accepted_by_a_retry(
    tmp_path: Path, failure: Failure
) -> None:
    recipe = Recipe(optimizer="adamw_bf16", activation_checkpointing=False)
    training = {"max_length": 1024, "micro_batch_tokens": 8192, "batch_size": 64}
    claim = _claim(tmp_path, recipe, training=training)
    found = _examine(tmp_path, claim, failure, log=MESSAGE).diagnosis
    assert found is not None
    changes = [remedy["changes"] for remedy in found["remedies"]]
    assert any("micro_batch_tokens" in change for change in changes)
    now = recipe.model_dump(mode="json")
    for change in changes:
        assert Recipe.model_validate(now | change).model_dump(mode="json") == now | change
        assert all(now[name] != value for name, value in change.items())


def test_the_next_attempt_has_the_plan_of_its_own_recipe(tmp_path: Path, failure: Failure) -> None:
    found = _examine(tmp_path, _claim(tmp_path, Recipe()), failure, log=MESSAGE)
    assert found.plan is not None
    assert found.plan["verdict"] == "fits"
    assert found.plan["recipe"]["optimizer_in_backward"]


def test_an_oom_kill_is_examined_without_a_failure_file(tmp_path: Path) -> None:
    claim = _claim(tmp_path, Recipe(offload="all"))
    log = "Killed: exit code -9, oom_kill counted by the kernel"
    found = _examine(tmp_path, claim, None, log=log).diagnosis
    assert found is not None
    assert found["cause"] == "host_memory"


def test_the_message_of_a_model_of_unknown_shape_is_read_too(
    tmp_path: Path, failure: Failure
) -> None:
    source = {"config": {"model_type": "unheard_of"}, "tokenizer": {"train": True}}
    claim = _claim(tmp_path, Recipe(), model=source)
    found = _examine(tmp_path, claim, failure, log=MESSAGE)
    assert found.diagnosis is not None
    assert found.diagnosis["message"] is not None
    assert found.diagnosis["message"]["requested_bytes"] == 932 * 2**20
    assert found.recipe_changes == {}
