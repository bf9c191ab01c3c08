"""One request trains a teacher, distils it, evaluates the student and promotes it, in real processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.shared.files.hashing import file_sha256
from tests.system.conftest import RunningPlatform

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

TEACHER = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
STUDENT = {**TEACHER, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
COMMON = {
    "training": {"epochs": 6, "learning_rate": 0.01, "max_length": 32},
    "recipe": {},
    "resources": {"ranks": "auto", "device": "cpu"},
}


def upload(url: str) -> str:
    """Add 400 texts whose label is one of their words; return the dataset's id."""
    rows = [
        {"text": f"review {n}: the room was {word}", "sentiment": label}
        for n in range(200)
        for word, label in (("clean", "positive"), ("dirty", "negative"))
    ]
    file = "".join(json.dumps(row) + "\n" for row in rows).encode()
    form = {"name": "reviews", "heads": json.dumps([{"name": "sentiment"}])}
    response = httpx.post(f"{url}/datasets", files={"file": ("reviews.jsonl", file)}, data=form)
    dataset_id: str = response.json()["id"]
    return dataset_id


def test_a_chain_ends_with_a_student_being_served(
    platform: RunningPlatform, tmp_path: Path
) -> None:
    url = platform.url
    own = {"config": TEACHER, "tokenizer": {"train": True, "vocab_size": 400}}
    student = {"config": STUDENT, "tokenizer": "teacher", "trim_vocabulary": True}
    chain = {
        "kind": "chain",
        "teacher": {"dataset_id": upload(url), "model": own, **COMMON},
        "distill": {"student": student, "promote": "when_passed", **COMMON},
    }
    command = ["jobs", "submit", "-", "--watch", "--json", "--url", url]
    done = CliRunner().invoke(app, command, input=json.dumps(chain))
    assert done.exit_code == 0, done.output

    child, teacher = httpx.get(f"{url}/jobs").json()["items"]
    assert [job["kind"] for job in (teacher, child)] == ["teacher", "distill"]
    assert [job["state"] for job in (teacher, child)] == ["succeeded", "succeeded"]
    assert child["parent_job_id"] == teacher["id"]
    model = httpx.get(f"{url}/models/{child['id']}").json()
    assert model["gate"]["passed"]
    promotions = httpx.get(f"{url}/promotions").json()["items"]
    assert [promotion["model_id"] for promotion in promotions] == [model["id"]]
    assert predict(url, "the room was dirty")["label"] == "negative"
    _check_choices(teacher["id"], child["id"], url)
    _check_export(child["id"], url, tmp_path)


def _check_choices(teacher_id: str, student_id: str, url: str) -> None:
    """What the chain left to the machine was measured and counted, and planned with that."""
    for job_id in (teacher_id, student_id):
        job = httpx.get(f"{url}/jobs/{job_id}").json()
        chosen = {decision["field"]: decision for decision in job["plan"]["decisions"]}
        assert chosen["recipe.compute"]["basis"] == "measured"
        assert chosen["recipe.compute"]["value"] == job["recipe"]["compute"]
        assert job["recipe"]["reduce"] == job["plan"]["recipe"]["compute"]
        assert chosen["resources.ranks"]["value"] == job["spec"]["resources"]["ranks"]
        assert job["attempts"][0]["plan"] == job["plan"]
        assert (
            httpx.get(f"{url}/models/{job_id}").json()["parameters"]
            == job["plan"]["num_parameters"]
        )
    rows = chosen["student.trim_vocabulary"]["value"]
    assert rows == httpx.get(f"{url}/models/{student_id}").json()["metrics"]["vocabulary"]["rows"]


def _check_export(student_id: str, url: str, directory: Path) -> None:
    """The student is downloaded through the API, and exported as a classifier of transformers."""
    ask = ["--url", url, "--json"]
    copy, out = directory / "copy", directory / "classifier"
    done = CliRunner().invoke(app, ["models", "download", student_id, "--out", str(copy), *ask])
    assert done.exit_code == 0, done.output
    sums = json.loads((copy / "manifest.json").read_text())["files"]
    assert {name: file_sha256(copy / name) for name in sums} == sums
    done = CliRunner().invoke(app, ["models", "export", student_id, "--out", str(out), *ask])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["heads"]["sentiment"] < 1e-4
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["problem_type"] == "single_label_classification"


def predict(url: str, text: str) -> dict[str, Any]:
    """Return the best label of a text, once the promoted student is loaded."""
    deadline = time.monotonic() + 60
    while (response := httpx.post(f"{url}/predict", json={"inputs": text})).status_code == 503:
        assert time.monotonic() < deadline, response.text
        time.sleep(0.2)
    best: dict[str, Any] = response.json()[0]
    return best
