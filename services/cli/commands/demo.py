"""`stillhouse demo`: the whole pipeline on real reviews, over HTTP, on this machine.

Uploads a dataset, trains a teacher on two ranks, queues a distillation while the teacher is still
training, promotes the student and classifies one text.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.cli.client import Client, CommandFailed
from services.cli.demo_data import HEADS, ReviewsMissing, write_reviews
from services.cli.responses import JobResponse, ModelResponse

EXAMPLE_TEXT = "房间很干净，服务员也热情，下次还住这里。"
POLL_SECONDS = 0.5
LINE_SECONDS = 5.0  # between lines of progress where the output is no terminal

# Small enough for two CPU cores and five minutes, yet a complete Qwen3: grouped-query attention,
# q/k norm, gated MLP. The learning rate suits training from scratch, not fine-tuning.
_TEACHER = {
    "model_type": "qwen3",
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
}
_STUDENT = {
    **_TEACHER,
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
_RECIPE = {"compute": "float32", "reduce": "float32", "activation_checkpointing": False}
_TRAINING = {
    "learning_rate": 1e-3,
    "batch_size": 32,
    "micro_batch_tokens": 2048,
    "max_length": 64,
    "seed": 0,
}


class HeadScores(TypedDict):
    """The scores of one head on held-out reviews."""

    accuracy: float
    macro_f1: float


class ModelResult(TypedDict):
    """The quality and the size of one model."""

    heads: dict[str, HeadScores]
    parameters: int
    size_bytes: int


class DemoResult(TypedDict):
    """What the demo prints, and writes with `--json`."""

    teacher: ModelResult
    student: ModelResult
    baseline: dict[str, HeadScores]  # n-gram counts with logistic regression, by head
    student_over_teacher: float
    predict: Any  # the response of `POST /predict`
    job_seconds: dict[str, float]
    seconds: float


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the result as JSON to this file.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="The data directory of the embedded platform.")
    ] = Path(".stillhouse/demo"),
    url: Annotated[
        str | None, typer.Option("--url", help="Use a running platform instead of an embedded one.")
    ] = None,
) -> None:
    """Run the whole pipeline on real reviews: dataset, teacher, student, promotion, prediction."""
    console = Console()
    started = time.monotonic()
    try:
        with _platform(url, data_dir=data_dir) as address, Client(address) as client:
            console.print(f"Platform at {address}")
            result = _run_pipeline(client, console=console)
    except (ReviewsMissing, CommandFailed) as error:
        console.print(f"[red]demo:[/red] {error}")
        raise typer.Exit(1) from error
    result["seconds"] = round(time.monotonic() - started, 1)
    console.print(_table(result))
    console.print(f"POST /predict {EXAMPLE_TEXT}")
    console.print_json(data=result["predict"])
    if json_file is not None:
        json_file.write_text(json.dumps(result, ensure_ascii=False, indent=2) + "\n", "utf-8")


@contextmanager
def _platform(url: str | None, *, data_dir: Path) -> Iterator[str]:
    """Yield the URL of a platform: the given one, or an embedded one that is stopped afterwards."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch) / "ready.json"
        command = [sys.executable, "-m", "services.cli.main", "up", "--port", "0"]
        command += ["--data-dir", str(data_dir), "--ready-file", str(ready)]
        up = subprocess.Popen(command)
        try:
            while not ready.exists():
                if up.poll() is not None:
                    raise CommandFailed("the embedded platform did not start; its output is above")
                time.sleep(POLL_SECONDS)
            yield json.loads(ready.read_text())["url"]
        finally:
            up.terminate()
            up.wait()


def _run_pipeline(client: Client, *, console: Console) -> DemoResult:
    with tempfile.TemporaryDirectory() as scratch:
        reviews = Path(scratch) / "reviews.jsonl"
        write_reviews(reviews)
        with reviews.open("rb") as file:
            dataset = client.post(
                "/datasets",
                data={"name": "reviews", "heads": json.dumps(HEADS)},
                files={"file": ("reviews.jsonl", file)},
            )
    console.print(f"Dataset {dataset['id']}: {dataset['rows']}")
    teacher = client.post("/jobs", json=_teacher_spec(dataset["id"]))
    # Submitted while the teacher is still training: the distillation waits for it.
    student = client.post("/jobs", json=_student_spec(dataset["id"], teacher["id"]))
    jobs = {"teacher": teacher["id"], "student": student["id"]}
    ended = {part: _watch(client, part, job, console=console) for part, job in jobs.items()}
    models: dict[str, ModelResponse] = {
        part: client.get(f"/models/{job['model_id']}") for part, job in ended.items()
    }
    client.post(f"/models/{models['student']['id']}/promote", json={})
    console.print(f"Promoted {models['student']['id']}")
    return _result(models, ended=ended, prediction=_predict(client))


def _teacher_spec(dataset_id: str) -> dict[str, object]:
    return {
        "kind": "teacher",
        "name": "demo teacher",
        "dataset_id": dataset_id,
        "model": {"config": _TEACHER, "tokenizer": {"train": True, "vocab_size": 6000}},
        "training": {**_TRAINING, "epochs": 1.5},
        "recipe": _RECIPE,
        "resources": {"ranks": 2, "device": "cpu"},
    }


def _student_spec(dataset_id: str, teacher_job_id: str) -> dict[str, object]:
    return {
        "kind": "distill",
        "name": "demo student",
        "dataset_id": dataset_id,
        "teacher": {"job_id": teacher_job_id},
        "student": {"config": _STUDENT, "tokenizer": "teacher"},
        "training": {**_TRAINING, "epochs": 3, "learning_rate": 2e-3},
        "recipe": _RECIPE,
        "resources": {"ranks": 2, "device": "cpu"},
    }


def _watch(client: Client, part: str, job_id: str, *, console: Console) -> JobResponse:
    """Show a job's progress until it ends, and return it; raises CommandFailed unless it succeeds."""
    columns = (
        TextColumn("{task.description:<9}"),
        TextColumn("{task.fields[phase]:<11}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    last_line = time.monotonic()
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task(part, total=1, phase="waiting", loss="")
        while True:
            job: JobResponse = client.get(f"/jobs/{job_id}")
            progress = job["progress"] or {}
            loss = progress.get("loss")
            bars.update(
                bar,
                completed=progress.get("step") or 0,
                total=progress.get("total_steps") or 1,
                phase=job["phase"] or job["state"],
                loss="" if loss is None else f"loss {loss:.3f}",
            )
            if not console.is_terminal and time.monotonic() - last_line >= LINE_SECONDS:
                last_line = time.monotonic()
                phase, steps = job["phase"] or job["state"], progress.get("step") or 0
                typer.echo(f"{part}: {phase}, step {steps} of {progress.get('total_steps') or '?'}")
            if job["state"] in ("succeeded", "failed", "cancelled"):
                break
            time.sleep(POLL_SECONDS)
    if job["state"] != "succeeded":
        raise CommandFailed(
            f"the {part} job {job_id} {job['state']} ({job['reason']}): {job['message']}"
        )
    return job


def _predict(client: Client) -> Any:
    """Classify a text with the promoted student, which may not be loaded yet (status 503)."""
    for _ in range(60):
        try:
            return client.post("/predict", json={"inputs": EXAMPLE_TEXT})
        except CommandFailed as error:
            if error.status != 503:
                raise
        time.sleep(POLL_SECONDS)
    raise CommandFailed("the promoted student was not loaded within 30 seconds")


def _result(
    models: dict[str, ModelResponse], *, ended: dict[str, JobResponse], prediction: Any
) -> DemoResult:
    teacher, student = _model_result(models["teacher"]), _model_result(models["student"])
    ratio = student["heads"]["sentiment"]["accuracy"] / teacher["heads"]["sentiment"]["accuracy"]
    return {
        "teacher": teacher,
        "student": student,
        "baseline": _baseline(models["student"]),
        "student_over_teacher": round(ratio, 4),
        "predict": prediction,
        "job_seconds": {name: _seconds(job) for name, job in ended.items()},
        "seconds": 0.0,
    }


def _model_result(model: ModelResponse) -> ModelResult:
    heads = (model["metrics"] or {}).get("heads") or {}
    return {
        "heads": {
            head: {"accuracy": metrics["accuracy"], "macro_f1": metrics["macro_f1"]}
            for head, metrics in heads.items()
        },
        "parameters": model["parameters"],
        "size_bytes": model["size_bytes"],
    }


def _baseline(model: ModelResponse) -> dict[str, HeadScores]:
    heads = (model["metrics"] or {}).get("heads") or {}
    return {
        head: {
            "accuracy": metrics["baseline"]["accuracy"],
            "macro_f1": metrics["baseline"]["macro_f1"],
        }
        for head, metrics in heads.items()
        if metrics.get("baseline")
    }


def _seconds(job: JobResponse) -> float:
    return round(_timestamp(job["ended_at"]) - _timestamp(job["started_at"]), 1)


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _table(result: DemoResult) -> Table:
    table = Table(title="Held-out reviews")
    for column in ("", "head", "accuracy", "macro-F1", "parameters", "MB", "job seconds"):
        table.add_column(column, justify="left" if column in ("", "head") else "right")
    for name, model in (("teacher", result["teacher"]), ("student", result["student"])):
        for head, scores in model["heads"].items():
            table.add_row(
                name,
                head,
                f"{scores['accuracy']:.3f}",
                f"{scores['macro_f1']:.3f}",
                f"{model['parameters']:,}",
                f"{model['size_bytes'] / 1e6:.1f}",
                f"{result['job_seconds'][name]:.0f}",
            )
    for head, scores in result["baseline"].items():
        accuracy, macro_f1 = f"{scores['accuracy']:.3f}", f"{scores['macro_f1']:.3f}"
        table.add_row("n-grams", head, accuracy, macro_f1, "", "", "")
    table.caption = f"student / teacher accuracy on sentiment: {result['student_over_teacher']:.3f}"
    return table
