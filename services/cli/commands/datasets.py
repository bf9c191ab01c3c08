"""`stillhouse datasets`: add, list, show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from services.cli.client import (
    DEFAULT_URL,
    ApiKey,
    AsJson,
    CommandFailed,
    Url,
    open_client,
    print_json,
)
from services.cli.responses import DatasetResponse

app = typer.Typer(no_args_is_help=True, help="Upload and inspect labelled text.")


@app.command()
def add(
    file: Annotated[Path, typer.Argument(help="JSONL or CSV in UTF-8, or Parquet.")],
    head: Annotated[
        list[str] | None,
        typer.Option(
            "--head", help="A label column: NAME, NAME=COLUMN, or NAME:multi_label; repeatable."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Defaults to the file's name.")] = None,
    text_column: Annotated[
        str, typer.Option("--text-column", help="The column that holds the text.")
    ] = "text",
    labels_column: Annotated[
        str, typer.Option("--labels-column", help="A column that maps head names to labels.")
    ] = "labels",
    format: Annotated[
        str | None,
        typer.Option("--format", help="jsonl, csv or parquet; defaults to the file's suffix."),
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Upload a dataset; every row is validated, and faults are reported by line."""
    form = {
        "heads": json.dumps([_parse_head(text) for text in head or []]),
        "text_column": text_column,
        "labels_column": labels_column,
        **({} if name is None else {"name": name}),
        **({} if format is None else {"format": format}),
    }
    with open_client(url, api_key, as_json=as_json) as client:
        try:
            with file.open("rb") as content:
                dataset = client.post("/datasets", data=form, files={"file": (file.name, content)})
        except OSError as error:
            raise CommandFailed(f"Cannot read {file}: {error.strerror}") from error
    _show(dataset, as_json=as_json)


@app.command("list")
def list_datasets(
    limit: Annotated[int, typer.Option("--limit", min=1, max=500)] = 50,
    cursor: Annotated[
        str | None, typer.Option("--cursor", help="The next_cursor of the previous page.")
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """List datasets, newest first."""
    with open_client(url, api_key, as_json=as_json) as client:
        page = client.get("/datasets", params={"limit": limit, "cursor": cursor})
    if as_json:
        print_json(page)
        return
    table = Table(Column("dataset", no_wrap=True), "name", "rows", "heads", "created")
    for dataset in page["items"]:
        heads = ", ".join(f"{head['name']} ({len(head['labels'])})" for head in dataset["heads"])
        rows = sum(dataset["rows"].values())
        table.add_row(
            dataset["id"], dataset["name"], f"{rows:,}", heads, dataset["created_at"][:19]
        )
    Console().print(table)


@app.command()
def show(
    dataset_id: Annotated[str, typer.Argument(help="A dataset's id, such as ds_01kb6ztn8e0wq4v7.")],
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show a dataset: its heads and labels, rows per split, and warnings."""
    with open_client(url, api_key, as_json=as_json) as client:
        _show(client.get(f"/datasets/{dataset_id}"), as_json=as_json)


def _parse_head(text: str) -> dict[str, str]:
    """Parse NAME[:TYPE][=COLUMN]."""
    declared, _, column = text.partition("=")
    name, _, type_ = declared.partition(":")
    head = {"name": name}
    if type_:
        head["type"] = type_
    if column:
        head["column"] = column
    return head


def _show(dataset: DatasetResponse, *, as_json: bool) -> None:
    if as_json:
        print_json(dataset)
        return
    table = Table.grid(padding=(0, 2))
    table.add_row("dataset", f"{dataset['id']} {dataset['name']}")
    table.add_row("rows", ", ".join(f"{split} {n:,}" for split, n in dataset["rows"].items()))
    for head in dataset["heads"]:
        counts = dataset["label_counts"].get(head["name"], {})
        labels = ", ".join(f"{label} {n:,}" for label, n in counts.items())
        table.add_row(f"head {head['name']}", f"{head['type']}: {labels}")
    for warning in dataset["warnings"]:
        table.add_row("warning", warning)
    Console(highlight=False).print(table)
