"""`stillhouse demo`: the whole path on real reviews, through HTTP, on this machine.

A dataset is uploaded, a teacher trained on two ranks, a student distilled from it while the teacher
job is still running, promoted, and asked one question.
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
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.cli.client import Client, Refused
from services.cli.demo_data import HEADS, ReviewsMissing, write_reviews

QUESTION = "房间很干净，服务员也热情，下次还住这里。"
POLL_SECONDS = 0.5

# Small enough for two processor cores and five minutes, large enough to be a real Qwen3: grouped
# queries, q/k norm, gated MLP. The learning rate suits training from scratch, not fine-tuning.
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


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the result as JSON to this file.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="Where the embedded platform keeps its data.")
    ] = Path(".stillhouse/demo"),
    url: Annotated[
        str | None, typer.Option("--url", help="Use a running platform instead of an embedded one.")
    ] = None,
) -> None:
    """Run the whole path on real reviews: dataset, teacher, student, promotion, prediction."""
    console = Console()
    started = time.monotonic()
    try:
        with _platform(url, data_dir=data_dir) as address, Client(address) as client:
            console.print(f"Platform at {address}")
            result = _walk(client, console=console)
    except (ReviewsMissing, Refused) as error:
        console.print(f"[red]demo:[/red] {error}")
        raise typer.Exit(1) from error
    result["seconds"] = round(time.monotonic() - started, 1)
    console.print(_table(result))
    console.print(f"POST /predict {QUESTION}")
    console.print_json(data=result["predict"])
    if json_file is not None:
        json_file.write_text(json.dumps(result, ensure_ascii=False, indent=2) + "\n", "utf-8")


@contextmanager
def _platform(url: str | None, *, data_dir: Path) -> Iterator[str]:
    """Yield the address of a platform: the given one, or an embedded one that ends with us."""
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
                    raise Refused("the embedded platform did not start; its own words are above")
                time.sleep(POLL_SECONDS)
            yield json.loads(ready.read_text())["url"]
        finally:
            up.terminate()
            up.wait()


def _walk(client: Client, *, console: Console) -> dict[str, Any]:
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
    # The student's job is sent while the teacher is still in training: it waits for it.
    student = client.post("/jobs", json=_student_spec(dataset["id"], teacher["id"]))
    jobs = {"teacher": teacher["id"], "student": student["id"]}
    ended = {part: _watch(client, part, job, console=console) for part, job in jobs.items()}
    models = {part: client.get(f"/models/{job['model_id']}") for part, job in ended.items()}
    client.post(f"/models/{models['student']['id']}/promote", json={})
    console.print(f"Promoted {models['student']['id']}")
    answer = _predict(client)
    return _result(models, ended=ended, answer=answer)


def _teacher_spec(dataset_id: str) -> dict[str, Any]:
    return {
        "kind": "teacher",
        "name": "demo teacher",
        "dataset_id": dataset_id,
        "model": {"config": _TEACHER, "tokenizer": {"train": True, "vocab_size": 6000}},
        "training": {**_TRAINING, "epochs": 1.5},
        "recipe": _RECIPE,
        "resources": {"ranks": 2, "device": "cpu"},
    }


def _student_spec(dataset_id: str, teacher_job_id: str) -> dict[str, Any]:
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


def _watch(client: Client, part: str, job_id: str, *, console: Console) -> dict[str, Any]:
    """Show a job's progress until it ends; return it. Raises Refused where it did not succeed."""
    columns = (
        TextColumn("{task.description:<9}"),
        TextColumn("{task.fields[phase]:<11}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task(part, total=1, phase="waiting", loss="")
        while True:
            job: dict[str, Any] = client.get(f"/jobs/{job_id}")
            progress = job["progress"] or {}
            loss = progress.get("loss")
            bars.update(
                bar,
                completed=progress.get("step") or 0,
                total=progress.get("total_steps") or 1,
                phase=job["phase"] or job["state"],
                loss="" if loss is None else f"loss {loss:.3f}",
            )
            if job["state"] in ("succeeded", "failed", "cancelled"):
                break
            time.sleep(POLL_SECONDS)
    if job["state"] != "succeeded":
        raise Refused(f"the {part} job {job_id} {job['state']} ({job['reason']}): {job['message']}")
    return job


def _predict(client: Client) -> Any:
    """Ask the promoted student; it is loaded in the background, so the first answers may be 503."""
    for _ in range(60):
        try:
            return client.post("/predict", json={"inputs": QUESTION})
        except Refused as error:
            if error.status != 503:
                raise
        time.sleep(POLL_SECONDS)
    raise Refused("the promoted student was not loaded within 30 seconds")


def _result(models: dict[str, Any], *, ended: dict[str, Any], answer: Any) -> dict[str, Any]:
    def part(name: str) -> dict[str, Any]:
        model = models[name]
        return {
            "heads": {
                head: {"accuracy": values["accuracy"], "macro_f1": values["macro_f1"]}
                for head, values in model["metrics"]["heads"].items()
            },
            "parameters": model["parameters"],
            "size_bytes": model["size_bytes"],
        }

    teacher, student = part("teacher"), part("student")
    accuracies = [side["heads"]["sentiment"]["accuracy"] for side in (student, teacher)]
    return {
        "teacher": teacher,
        "student": student,
        "student_over_teacher": round(accuracies[0] / accuracies[1], 4),
        "predict": answer,
        "job_seconds": {name: _seconds(job) for name, job in ended.items()},
    }


def _seconds(job: dict[str, Any]) -> float:
    start, end = (_moment(job[key]) for key in ("started_at", "ended_at"))
    return round(end - start, 1)


def _moment(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _table(result: dict[str, Any]) -> Table:
    table = Table(title="Held-out reviews")
    for column in ("", "head", "accuracy", "macro-F1", "parameters", "MB", "job seconds"):
        table.add_column(column, justify="left" if column in ("", "head") else "right")
    for name in ("teacher", "student"):
        for head, values in result[name]["heads"].items():
            table.add_row(
                name,
                head,
                f"{values['accuracy']:.3f}",
                f"{values['macro_f1']:.3f}",
                f"{result[name]['parameters']:,}",
                f"{result[name]['size_bytes'] / 1e6:.1f}",
                f"{result['job_seconds'][name]:.0f}",
            )
    table.caption = f"student / teacher accuracy on sentiment: {result['student_over_teacher']:.3f}"
    return table
