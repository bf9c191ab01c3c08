"""`stillhouse jobs`: submit, list, show, watch, cancel, retry."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from services.cli.client import (
    DEFAULT_URL,
    ApiKey,
    AsJson,
    Client,
    CommandFailed,
    Url,
    open_client,
    print_json,
)
from services.cli.responses import DiagnosisResponse, JobResponse, PlanResponse, ProgressResponse
from services.cli.terminal import Console
from services.cli.views.deletion import format_deletion
from services.cli.views.label_quality import show_label_quality
from services.shared.memory.sizes import format_size

app = typer.Typer(no_args_is_help=True, help="Submit, watch, cancel and retry jobs.")

JobId = Annotated[str, typer.Argument(help="A job's id, such as job_01kb6ztn8e0wq4v7.")]
_TERMINAL = ("succeeded", "failed", "cancelled")


@app.command()
def submit(
    spec: Annotated[
        Path, typer.Argument(help="A job or chain spec as JSON; - reads standard input.")
    ],
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            help="Repeating a request with the same key and spec returns the same job.",
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Plan and queue a job, or a teacher with its distillation; if it cannot fit, show what would."""
    with open_client(url, api_key, as_json=as_json) as client:
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        job = client.post("/jobs", json=_read_json(spec), headers=headers)
        if not watch:
            _show(job, as_json=as_json)
            return
        for job_id in (job["id"], *job["child_job_ids"]):  # the distillation of a chain
            _watch(client, job_id, as_json=as_json)


@app.command("list")
def list_jobs(
    state: Annotated[str | None, typer.Option("--state", help="Only jobs in this state.")] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Only jobs of this kind: teacher or distill.")
    ] = None,
    deleted: Annotated[
        bool, typer.Option("--deleted", help="What is deleted and can still be restored.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500)] = 50,
    cursor: Annotated[
        str | None, typer.Option("--cursor", help="The next_cursor of the previous page.")
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """List jobs, newest first."""
    with open_client(url, api_key, as_json=as_json) as client:
        params = {
            "state": state,
            "kind": kind,
            "deleted": deleted,
            "limit": limit,
            "cursor": cursor,
        }
        page = client.get("/jobs", params=params)
    if as_json:
        print_json(page)
        return
    table = Table(Column("job", no_wrap=True), "kind", "name", "state", "progress", "created")
    for job in page["items"]:
        state_text = job["state"] + (f" ({job['reason']})" if job["reason"] else "")
        progress = job["progress"] or {}
        steps = f"{progress['step']}/{progress.get('total_steps')}" if "step" in progress else ""
        table.add_row(
            job["id"], job["kind"], job["name"] or "", state_text, steps, job["created_at"][:19]
        )
    Console().print(table)


@app.command()
def show(
    job_id: JobId, as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Show a job: its state, metrics, planned and measured memory, and diagnosis."""
    with open_client(url, api_key, as_json=as_json) as client:
        _show(client.get(f"/jobs/{job_id}"), as_json=as_json)


@app.command()
def watch(
    job_id: JobId, as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Follow a job until it ends; exit with code 1 unless it succeeds."""
    with open_client(url, api_key, as_json=as_json) as client:
        _watch(client, job_id, as_json=as_json)


@app.command("label-quality")
def label_quality(
    job_id: JobId,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most lines of each list.")] = 20,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """List likely wrong labels, duplicates across splits and contradictions of a trained teacher's dataset."""
    with open_client(url, api_key, as_json=as_json) as client:
        found = client.get(f"/jobs/{job_id}/label-quality")
    if as_json:
        print_json(found)
    else:
        show_label_quality(found, limit=limit)


@app.command()
def cancel(
    job_id: JobId, as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Cancel a job; a running job saves a checkpoint first."""
    with open_client(url, api_key, as_json=as_json) as client:
        _show(client.post(f"/jobs/{job_id}/cancel"), as_json=as_json)


@app.command()
def retry(
    job_id: JobId,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--change",
            help="A field of the recipe to change, such as optimizer=adafactor; repeatable.",
        ),
    ] = None,
    training: Annotated[
        list[str] | None,
        typer.Option(
            "--training", help="A training field to change, such as epochs=2; repeatable."
        ),
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Retry a failed or cancelled job from its last checkpoint, optionally with changes."""
    try:
        given = {"changes": parse_assignments(change), "training": parse_assignments(training)}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    body = {name: values for name, values in given.items() if values}
    with open_client(url, api_key, as_json=as_json) as client:
        _show(client.post(f"/jobs/{job_id}/retry", json=body), as_json=as_json)


@app.command()
def delete(
    job_id: JobId, as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Delete a job that has ended, with its run directories; its model stays."""
    with open_client(url, api_key, as_json=as_json) as client:
        deletion = client.delete(f"/jobs/{job_id}")
    if as_json:
        print_json(deletion)
        return
    Console(highlight=False).print(format_deletion(deletion), soft_wrap=True)


@app.command()
def restore(
    job_id: JobId, as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Undo the deletion of a job."""
    with open_client(url, api_key, as_json=as_json) as client:
        _show(client.post(f"/jobs/{job_id}/restore"), as_json=as_json)


def _read_json(path: Path) -> Any:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
        return json.loads(text)
    except OSError as error:
        raise CommandFailed(f"Cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CommandFailed(f"{path} is not valid JSON: {error}") from error


def parse_assignments(texts: list[str] | None) -> dict[str, object]:
    """Parse `name=value`; a value that is not JSON is a string. Raises ValueError."""
    values: dict[str, object] = {}
    for text in texts or []:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ValueError(f"{text!r} is not of the form name=value")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def _show(job: JobResponse, *, as_json: bool) -> None:
    if as_json:
        print_json(job)
        return
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    reason = f" ({job['reason']})" if job["reason"] else ""
    rows: list[tuple[str, str | None]] = [
        ("job", f"{job['id']} {job['name'] or ''}"),
        ("kind", job["kind"]),
        ("state", f"{job['state']}{reason}"),
        ("phase", None if job["state"] in _TERMINAL else job["phase"]),
        ("message", job["message"]),
        ("model", job["model_id"]),
        ("waits for", job["parent_job_id"] if job["state"] == "waiting" else None),
        ("distilled by", ", ".join(job["child_job_ids"])),
        ("attempt", str(job["attempt"]) if job["attempt"] else None),
    ]
    for head, metrics in ((job["metrics"] or {}).get("heads") or {}).items():
        scores = (
            f"{name} {metrics[name]:.4f}" for name in ("accuracy", "macro_f1") if name in metrics
        )
        rows.append((f"head {head}", ", ".join(scores)))
    rows += memory_rows(job)
    for name, value in rows:
        if value:
            table.add_row(name, value)
    console.print(table)


def memory_rows(job: JobResponse) -> list[tuple[str, str | None]]:
    """Return the planned and measured memory, and the diagnosis, as table rows."""
    plan: PlanResponse = job["plan"] or {}
    diagnosis: DiagnosisResponse = job["diagnosis"] or {}
    rows: list[tuple[str, str | None]] = []
    if "peak_bytes" in plan:
        rows.append(
            ("planned", f"{format_size(plan['peak_bytes'])} per rank, {plan.get('verdict')}")
        )
    for decision in plan.get("decisions") or []:
        field = decision["field"].rpartition(".")[2]
        why = f"{decision['value']} ({decision['basis']}: {decision['why']})"
        rows.append((field, why))
    peaks = {rank: max(phases.values()) for rank, phases in (job["measured"] or {}).items()}
    if peaks:
        worst = max(peaks, key=lambda rank: peaks[rank])
        rows.append(("measured", f"{format_size(peaks[worst])} on rank {worst}, the maximum"))
    if diagnosis:
        rows.append(("diagnosis", f"{diagnosis.get('cause')} ({diagnosis.get('confidence')})"))
        for remedy in (diagnosis.get("remedies") or [])[:3]:
            rows.append(("remedy", f"{remedy.get('change')}: {remedy.get('verdict')}"))
    return rows


def _watch(client: Client, job_id: str, *, as_json: bool) -> None:
    if as_json:
        for event in client.events(f"/jobs/{job_id}/events"):
            line = {"event": event.type, **event.data}
            sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
            sys.stdout.flush()
        job: JobResponse = client.get(f"/jobs/{job_id}")
    else:
        job = _watch_with_progress_bar(client, job_id)
        _show(job, as_json=False)
    if job["state"] != "succeeded":
        raise typer.Exit(1)


def _watch_with_progress_bar(client: Client, job_id: str) -> JobResponse:
    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("waiting", total=1, loss="")
        while True:
            for event in client.events(f"/jobs/{job_id}/events"):
                details = event.data.get("data") or {}
                if event.type == "phase":
                    bars.update(bar, description=details["phase"])
                elif event.type == "state":
                    bars.update(bar, description=details["state"])
                elif event.type == "progress":
                    progress: ProgressResponse = event.data["progress"]
                    loss = progress.get("loss")
                    bars.update(
                        bar,
                        description=event.data.get("phase") or "running",
                        completed=progress.get("step") or 0,
                        total=progress.get("total_steps") or 1,
                        loss="" if loss is None else f"loss {loss:.3f}",
                    )
            # The server also ends a stream after a while, before the job has ended.
            job: JobResponse = client.get(f"/jobs/{job_id}")
            if job["state"] in _TERMINAL:
                return job
