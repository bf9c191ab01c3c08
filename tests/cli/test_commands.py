"""The commands that use the API, against a real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app

Run = Callable[..., Result]

BACKBONE: dict[str, Any] = {
    "config": {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "tokenizer": {"train": True, "vocab_size": 300},
}


@pytest.fixture
def stillhouse(api_url: str) -> Run:
    """Run the command line against the API; the result's exit code is asserted by the caller."""

    def run(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner(env={"STILLHOUSE_URL": api_url, "COLUMNS": "200"}).invoke(
            app, list(arguments), input=stdin
        )

    return run


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reviews") / "reviews.jsonl"
    rows = [{"text": f"text {n}", "mood": "ab"[n % 2], "topic": ["x"]} for n in range(40)]
    rows[1]["topic"] = ["x", "y"]
    rows[2]["topic"] = ["y"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def dataset(stillhouse: Run, reviews: Path) -> dict[str, Any]:
    added = stillhouse(
        *("datasets", "add", str(reviews), "--name", "moods", "--json"),
        *("--head", "mood", "--head", "subject:multi_label=topic"),
    )
    assert added.exit_code == 0, added.output
    found: dict[str, Any] = json.loads(added.stdout)
    return found


@pytest.fixture
def spec(dataset: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "teacher",
        "name": "small",
        "dataset_id": dataset["id"],
        "model": BACKBONE,
        "resources": {"ranks": 1},
    }


def _submit(stillhouse: Run, spec: dict[str, Any], *options: str) -> dict[str, Any]:
    done = stillhouse("jobs", "submit", "-", "--json", *options, stdin=json.dumps(spec))
    assert done.exit_code == 0, done.output
    job: dict[str, Any] = json.loads(done.stdout)
    return job


def test_a_dataset_is_added_with_the_heads_that_were_named(dataset: dict[str, Any]) -> None:
    heads = {head["name"]: (head["type"], head["labels"]) for head in dataset["heads"]}
    assert heads == {"mood": ("single_label", ["a", "b"]), "subject": ("multi_label", ["x", "y"])}


def test_datasets_are_listed_and_shown(stillhouse: Run, dataset: dict[str, Any]) -> None:
    assert dataset["id"] in stillhouse("datasets", "list").output
    shown = stillhouse("datasets", "show", dataset["id"])
    assert "single_label: a 20, b 20" in shown.output
    assert json.loads(stillhouse("datasets", "show", dataset["id"], "--json").stdout) == dataset


def test_the_faults_of_a_file_are_reported_by_line(stillhouse: Run, tmp_path: Path) -> None:
    path = tmp_path / "faulty.jsonl"
    path.write_text('{"text": "", "mood": "a"}\n{"text": "t", "mood": 3.5}\n')
    done = stillhouse("datasets", "add", str(path), "--head", "mood")
    assert done.exit_code == 1
    assert "line 1: " in done.stderr
    assert "line 2: " in done.stderr


def test_a_missing_file_is_reported(stillhouse: Run, tmp_path: Path) -> None:
    done = stillhouse("datasets", "add", str(tmp_path / "none.jsonl"))
    assert done.exit_code == 1
    assert "none.jsonl: No such file" in done.stderr


def test_a_job_is_submitted_and_shown(stillhouse: Run, spec: dict[str, Any]) -> None:
    job = _submit(stillhouse, spec)
    assert job["state"] == "queued"
    shown = stillhouse("jobs", "show", job["id"])
    assert job["id"] in shown.output
    assert "per rank, fits" in shown.output
    assert json.loads(stillhouse("jobs", "show", job["id"], "--json").stdout) == job


def test_the_same_idempotency_key_returns_the_same_job(
    stillhouse: Run, spec: dict[str, Any]
) -> None:
    first, second = (
        _submit(stillhouse, spec, "--idempotency-key", spec["dataset_id"]) for _ in range(2)
    )
    assert first["id"] == second["id"]


def test_a_spec_is_read_from_a_file(stillhouse: Run, spec: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec))
    done = stillhouse("jobs", "submit", str(path))
    assert done.exit_code == 0
    assert "queued" in done.output


def test_a_chain_is_submitted_and_shows_its_distillation(
    stillhouse: Run, spec: dict[str, Any], tmp_path: Path
) -> None:
    del spec["kind"]
    path = tmp_path / "chain.json"
    path.write_text(
        json.dumps({"kind": "chain", "teacher": spec, "distill": {"student": BACKBONE}})
    )
    done = stillhouse("jobs", "submit", str(path), "--json")
    assert done.exit_code == 0, done.output
    teacher = json.loads(done.stdout)
    (child,) = teacher["child_job_ids"]
    assert f"distilled by  {child}" in stillhouse("jobs", "show", teacher["id"]).output
    assert teacher["id"] in stillhouse("jobs", "show", child).output


def test_jobs_are_listed_by_state(stillhouse: Run, spec: dict[str, Any]) -> None:
    job = _submit(stillhouse, spec)
    assert job["id"] in stillhouse("jobs", "list", "--state", "queued", "--limit", "500").output
    assert job["id"] not in stillhouse("jobs", "list", "--state", "running").output


def test_a_cancelled_job_can_be_watched_and_retried_with_changes(
    stillhouse: Run, spec: dict[str, Any]
) -> None:
    job = _submit(stillhouse, spec)
    cancelled = stillhouse("jobs", "cancel", job["id"], "--json")
    assert json.loads(cancelled.stdout)["state"] == "cancelled"
    watched = stillhouse("jobs", "watch", job["id"], "--json")
    states = [json.loads(line) for line in watched.stdout.splitlines()]
    assert [event["data"]["state"] for event in states] == ["queued", "cancelled"]
    assert watched.exit_code == 1
    changes = ("--change", "optimizer=adafactor", "--training", "epochs=2")
    again = json.loads(stillhouse("jobs", "retry", job["id"], *changes, "--json").stdout)
    assert again["retry_of"] == job["id"]
    assert again["recipe"]["optimizer"] == "adafactor"
    assert again["spec"]["training"]["epochs"] == 2


def test_watching_with_a_progress_bar_ends_with_the_job(
    stillhouse: Run, spec: dict[str, Any]
) -> None:
    job = _submit(stillhouse, spec)
    stillhouse("jobs", "cancel", job["id"])
    watched = stillhouse("jobs", "watch", job["id"])
    assert watched.exit_code == 1
    assert "cancelled" in watched.output


FAILURES = [
    (["jobs", "show", "job_nowhere"], "There is no job 'job_nowhere'."),
    (["models", "show", "mdl_nowhere"], "There is no model 'mdl_nowhere'."),
    (["models", "promote", "mdl_nowhere"], "There is no model 'mdl_nowhere'."),
    (["datasets", "show", "ds_nowhere"], "There is no dataset 'ds_nowhere'."),
    (["predict", "a text"], ""),
]


@pytest.mark.parametrize(("arguments", "message"), FAILURES)
def test_a_failure_is_a_message_and_exit_code_1(
    stillhouse: Run, arguments: list[str], message: str
) -> None:
    done = stillhouse(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_an_invalid_field_is_named_and_json_output_is_the_problem_document(
    stillhouse: Run, spec: dict[str, Any]
) -> None:
    spec["training"] = {"epochs": -1}
    done = stillhouse("jobs", "submit", "-", "--json", stdin=json.dumps(spec))
    assert done.exit_code == 1
    assert "training.epochs" in done.stderr
    assert json.loads(done.stdout)["status"] == 422


def test_a_job_that_cannot_fit_is_reported_with_alternatives(
    stillhouse: Run, spec: dict[str, Any]
) -> None:
    big = {**BACKBONE["config"], "hidden_size": 4096, "num_hidden_layers": 32, "head_dim": 128}
    big |= {"intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    spec["model"] = BACKBONE | {"config": big}
    spec["recipe"] = {"optimizer": "adamw"}
    spec["resources"] = {"ranks": 2, "device": "a100-40"}
    done = stillhouse("jobs", "submit", "-", stdin=json.dumps(spec))
    assert done.exit_code == 1
    assert "These alternatives would fit:" in done.stderr


def test_invalid_json_is_rejected_before_it_is_sent(stillhouse: Run) -> None:
    done = stillhouse("jobs", "submit", "-", stdin="{kind: teacher}")
    assert done.exit_code == 1
    assert "is not valid JSON" in done.stderr


def test_a_change_without_a_value_is_rejected(stillhouse: Run) -> None:
    done = stillhouse("jobs", "retry", "job_1", "--change", "optimizer")
    assert done.exit_code == 2
    assert "name=value" in done.stderr


def test_an_empty_list_of_models_is_shown(stillhouse: Run) -> None:
    assert json.loads(stillhouse("models", "list", "--json").stdout)["items"] == []
    assert stillhouse("models", "list").exit_code == 0


def test_an_unreachable_api_is_reported_with_how_to_start_it() -> None:
    done = CliRunner().invoke(app, ["jobs", "list", "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert "http://127.0.0.1:1 does not respond" in done.stderr
    assert "stillhouse up" in done.stderr


def test_a_preview_names_what_was_found_and_the_command(stillhouse: Run, tmp_path: Path) -> None:
    path = tmp_path / "moods.csv"
    path.write_text("review;mood\n" + "".join(f"text {n};{n % 2}\n" for n in range(40)))
    done = stillhouse("datasets", "preview", str(path))
    assert done.exit_code == 0, done.output
    assert "Found: csv, encoding utf-8, delimiter ';', with a header, columns 'review', 'mood'" in (
        done.output
    )
    assert "stillhouse datasets add moods.csv --text-column review --head mood" in done.output


def test_several_files_become_the_splits(stillhouse: Run, tmp_path: Path) -> None:
    for name, count in (("train", 30), ("dev", 10), ("test", 4)):
        rows = "".join(f"{name} {n}\t{('glad', 'sad')[n % 2]}\n" for n in range(count))
        (tmp_path / f"{name}.tsv").write_text("text\tmood\n" + rows)
    files = [str(tmp_path / f"{name}.tsv") for name in ("train", "dev", "test")]
    done = stillhouse("datasets", "add", *files, "--head", "mood", "--name", "moods", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"] == {"train": 30, "validation": 10, "test": 4}


def test_a_refused_upload_shows_the_command_to_repeat(stillhouse: Run, tmp_path: Path) -> None:
    path = tmp_path / "moods.csv"
    path.write_text("review,mood\n" + "".join(f"text {n},{n % 2}\n" for n in range(40)))
    done = stillhouse("datasets", "add", str(path), "--head", "mood")
    assert done.exit_code == 1
    assert (
        "Repeat with: stillhouse datasets add moods.csv --text-column review --head mood"
        in done.stderr
    )
