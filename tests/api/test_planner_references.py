"""What a spec refers to is looked up before any directory is read on its behalf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.api.admission import Admission
from services.shared.jobs.planning.model_shapes import read_heads
from tests.api.harness import JobDriver
from tests.sandboxes import sandboxes

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 100,
}


@pytest.fixture
def client(desk: JobDriver, tmp_path: Path) -> Any:
    settings = desk.platform.settings
    settings.models_dir.mkdir()
    (settings.data_dir / "outside").mkdir()
    (settings.data_dir / "outside" / "config.json").write_text(json.dumps(CONFIG))
    desk.platform.admission = Admission(desk.store, settings, sandboxes().calculations)
    return desk.platform.client()


@pytest.mark.parametrize("path", ["/jobs", "/jobs/plan"])
@pytest.mark.parametrize("id", ["../outside", "mdl_0", "", "..", "x" * 5000])
def test_an_invalid_id_is_named_and_no_directory_is_read(
    client: Any, desk: JobDriver, path: str, id: str
) -> None:
    model = {"config": CONFIG, "tokenizer": {"train": True}}
    teacher = desk.submit(desk.spec(model=model)).json()["id"]
    for body, field in [
        (desk.spec(model={"model_id": id}), "model.model_id"),
        ({**desk.distill(job_id=teacher), "student": {"model_id": id}}, "student.model_id"),
        (desk.distill(model_id=id), "teacher.model_id"),
        (desk.distill(job_id=id), "teacher.job_id"),
        (desk.spec(dataset_id=id), "dataset_id"),
    ]:
        response = client.post(path, json=body)
        assert response.status_code == 422
        assert [error["field"] for error in response.json()["errors"]] == [field]


UNKNOWN = {"config": {"model_type": "unheard_of"}, "tokenizer": {"train": True}}


@pytest.mark.parametrize(
    ("teacher", "student", "field"),
    [
        (UNKNOWN, {"config": CONFIG, "tokenizer": "teacher"}, "teacher.job_id"),
        (
            {"config": CONFIG, "tokenizer": {"train": True}},
            {"config": {"model_type": "unheard_of"}, "tokenizer": "teacher"},
            "student.config",
        ),
    ],
)
def test_a_model_that_cannot_be_planned_is_named(
    client: Any, desk: JobDriver, teacher: dict[str, Any], student: dict[str, Any], field: str
) -> None:
    job = client.post("/jobs", json=desk.spec(model=teacher))
    assert job.status_code == 202  # it may train all the same
    body = {**desk.distill(job_id=job.json()["id"]), "student": student}
    response = client.post("/jobs/plan", json=body)
    assert response.status_code == 422
    [error] = response.json()["errors"]
    assert error["field"] == field
    assert "unheard_of" in error["message"]


def test_a_chain_names_the_part_and_its_model(client: Any, desk: JobDriver) -> None:
    chain = {
        "kind": "chain",
        "teacher": {"dataset_id": desk.dataset_id, "model": UNKNOWN},
        "distill": {"student": {"config": CONFIG, "tokenizer": "teacher"}},
    }
    response = client.post("/jobs/plan", json=chain)
    assert [error["field"] for error in response.json()["errors"]] == ["teacher.model.config"]


@pytest.mark.parametrize("made_here", [True, False])
@pytest.mark.parametrize(
    ("labels", "fits"), [(["positive", "negative"], True), (["bad", "good"], False)]
)
def test_a_teacher_in_a_directory_with_other_labels_is_refused_with_both_lists(
    client: Any, desk: JobDriver, labels: list[str], fits: bool, made_here: bool
) -> None:
    directory = desk.platform.settings.model_roots[0] / "teacher"
    directory.mkdir()
    named = {} if made_here else {"id2label": {str(n): label for n, label in enumerate(labels)}}
    (directory / "config.json").write_text(json.dumps(CONFIG | named))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    if made_here:
        head = {"name": "sentiment", "type": "single_label", "labels": labels}
        (directory / "heads.json").write_text(json.dumps({"heads": [head]}))
    student = {"config": CONFIG, "tokenizer": "teacher"}
    body = {**desk.distill(path="teacher"), "student": student}
    response = client.post("/jobs/plan", json=body)
    if fits:
        assert response.json()["verdict"] == "fits", response.text
        return
    assert response.status_code == 422
    [error] = response.json()["errors"]
    assert error["field"] == "heads"
    assert "the teacher has sentiment (single_label: bad, good)" in error["message"]
    assert "the student has sentiment (single_label: negative, positive)" in error["message"]


@pytest.mark.parametrize("heads", ["", "[]", '{"heads": 1}', '{"heads": [{"name": 1}]}'])
def test_heads_that_cannot_be_read_are_left_to_the_ranks(heads: str, tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_text(heads)
    assert read_heads(tmp_path, []) is None
