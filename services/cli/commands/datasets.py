"""`stillhouse datasets`: preview, add, list, show."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from services.cli.client import (
    DEFAULT_URL,
    ApiKey,
    AsJson,
    Url,
    open_client,
    print_json,
)
from services.cli.responses import DatasetResponse, PreviewResponse
from services.cli.terminal import Console
from services.cli.upload_form import bundle, make_form, parse_head, parse_label_names
from services.cli.views.deletion import format_deletion

_SHOWN_LABELS = 100

app = typer.Typer(no_args_is_help=True, help="Upload and inspect labelled text.")

DatasetId = Annotated[str, typer.Argument(help="A dataset's id, such as ds_01kb6ztn8e0wq4v7.")]

Files = Annotated[
    list[Path],
    typer.Argument(
        help="A table of texts; several files named train, validation and test; or a directory."
    ),
]
Heads = Annotated[
    list[str] | None,
    typer.Option(
        "--head",
        help="A label column: NAME, NAME=COLUMN, NAME:multi_label=COLUMN, or "
        "NAME:multi_label=COLUMN1,COLUMN2 for columns of 0 and 1; repeatable.",
    ),
]
TextColumn = Annotated[str, typer.Option("--text-column", help="The column that holds the text.")]
TextPairColumn = Annotated[
    str | None,
    typer.Option(
        "--text-pair-column", help="The second text of pairs that are classified together."
    ),
]
LabelsColumn = Annotated[
    str, typer.Option("--labels-column", help="A column that maps head names to labels.")
]
SplitColumn = Annotated[
    str | None,
    typer.Option("--split-column", help="A column of train, validation and test."),
]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="jsonl, json, csv, fasttext, xlsx, parquet, arrow or folder; detected by default.",
    ),
]
Encoding = Annotated[
    str | None,
    typer.Option("--encoding", help="For example gb18030 or cp1252; detected by default."),
]
Delimiter = Annotated[
    str | None, typer.Option("--delimiter", help="Of a CSV file; detected by default.")
]
Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="Whether a table has a header; without one, its columns are column1, column2, ...",
    ),
]
QuoteStyle = Annotated[
    str | None,
    typer.Option(
        "--quotes",
        help="How CSV writes quotes within fields: doubled (the default), backslash or none.",
    ),
]
LabelSeparator = Annotated[
    str | None,
    typer.Option(
        "--label-separator", help="Between the labels of a multi_label head; | by default."
    ),
]
LabelNames = Annotated[
    list[str] | None,
    typer.Option(
        "--label-names",
        help="Names of a head's values: HEAD=FIRST,SECOND for 0, 1, ..., or HEAD=FILE with a JSON object or "
        "CSV lines VALUE,NAME; repeatable.",
    ),
]
MissingLabels = Annotated[
    list[str] | None,
    typer.Option("--missing-label", help="A value that means no label, such as -1; repeatable."),
]
MergeLabels = Annotated[
    bool,
    typer.Option(
        "--merge-labels",
        help="Read labels that differ only in case, width or invisible characters as one.",
    ),
]
SkipBadRows = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Leave out rows with faults, and count them.")
]
TruncateLongTexts = Annotated[
    bool, typer.Option("--truncate-long-texts", help="Cut texts at 1,000,000 characters.")
]
RemoveControlCharacters = Annotated[
    bool,
    typer.Option(
        "--remove-control-characters",
        help="Remove control characters from texts, and count the texts; they are a fault by default.",
    ),
]


@app.command()
def preview(
    files: Files,
    head: Heads = None,
    text_column: TextColumn = "text",
    text_pair_column: TextPairColumn = None,
    labels_column: LabelsColumn = "labels",
    split_column: SplitColumn = None,
    format: FormatName = None,
    encoding: Encoding = None,
    delimiter: Delimiter = None,
    header: Header = None,
    quotes: QuoteStyle = None,
    label_separator: LabelSeparator = None,
    label_names: LabelNames = None,
    missing_label: MissingLabels = None,
    merge_labels: MergeLabels = False,
    skip_bad_rows: SkipBadRows = False,
    truncate_long_texts: TruncateLongTexts = False,
    remove_control_characters: RemoveControlCharacters = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show how a file would be read, what would be dropped, and the command that uploads it."""
    with open_client(url, api_key, as_json=as_json) as client:
        form = make_form(
            heads=[parse_head(text) for text in head or []],
            text_column=text_column,
            text_pair_column=text_pair_column,
            labels_column=labels_column,
            split_column=split_column,
            format=format,
            encoding=encoding,
            delimiter=delimiter,
            header=header,
            quotes=quotes,
            label_separator=label_separator,
            label_names=parse_label_names(label_names or []),
            missing_labels=missing_label or [],
            merge_labels=merge_labels,
            on_bad_rows="skip" if skip_bad_rows else None,
            on_long_texts="truncate" if truncate_long_texts else None,
            on_control_characters="remove" if remove_control_characters else None,
        )
        with bundle(files) as (filename, content):
            result = client.post(
                "/datasets/preview", data=form, files={"file": (filename, content)}
            )
    if as_json:
        print_json(result)
    else:
        _show_preview(result)


@app.command()
def add(
    files: Files,
    head: Heads = None,
    name: Annotated[str | None, typer.Option("--name", help="Defaults to the file's name.")] = None,
    text_column: TextColumn = "text",
    text_pair_column: TextPairColumn = None,
    labels_column: LabelsColumn = "labels",
    split_column: SplitColumn = None,
    format: FormatName = None,
    encoding: Encoding = None,
    delimiter: Delimiter = None,
    header: Header = None,
    quotes: QuoteStyle = None,
    label_separator: LabelSeparator = None,
    label_names: LabelNames = None,
    missing_label: MissingLabels = None,
    merge_labels: MergeLabels = False,
    skip_bad_rows: SkipBadRows = False,
    truncate_long_texts: TruncateLongTexts = False,
    remove_control_characters: RemoveControlCharacters = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Upload a dataset; every row is validated, and faults are reported by line."""
    with open_client(url, api_key, as_json=as_json) as client:
        form = make_form(
            name=name,
            heads=[parse_head(text) for text in head or []],
            text_column=text_column,
            text_pair_column=text_pair_column,
            labels_column=labels_column,
            split_column=split_column,
            format=format,
            encoding=encoding,
            delimiter=delimiter,
            header=header,
            quotes=quotes,
            label_separator=label_separator,
            label_names=parse_label_names(label_names or []),
            missing_labels=missing_label or [],
            merge_labels=merge_labels,
            on_bad_rows="skip" if skip_bad_rows else None,
            on_long_texts="truncate" if truncate_long_texts else None,
            on_control_characters="remove" if remove_control_characters else None,
        )
        with bundle(files) as (filename, content):
            dataset = client.post("/datasets", data=form, files={"file": (filename, content)})
    _show(dataset, as_json=as_json)


@app.command("list")
def list_datasets(
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
    """List datasets, newest first."""
    with open_client(url, api_key, as_json=as_json) as client:
        page = client.get(
            "/datasets", params={"deleted": deleted, "limit": limit, "cursor": cursor}
        )
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
    dataset_id: DatasetId,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show a dataset: its heads and labels, rows per split, and warnings."""
    with open_client(url, api_key, as_json=as_json) as client:
        _show(client.get(f"/datasets/{dataset_id}"), as_json=as_json)


@app.command()
def delete(
    dataset_id: DatasetId, as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Delete a dataset that no unfinished job uses."""
    with open_client(url, api_key, as_json=as_json) as client:
        deletion = client.delete(f"/datasets/{dataset_id}")
    if as_json:
        print_json(deletion)
        return
    Console(highlight=False).print(format_deletion(deletion), soft_wrap=True)


@app.command()
def restore(
    dataset_id: DatasetId, as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Undo the deletion of a dataset."""
    with open_client(url, api_key, as_json=as_json) as client:
        _show(client.post(f"/datasets/{dataset_id}/restore"), as_json=as_json)


def _show_preview(result: PreviewResponse) -> None:
    console = Console(highlight=False, markup=False)
    console.print(f"Found: {result['found']}", soft_wrap=True)
    rows = result["first_rows"]
    if rows:
        table = Table(*(Column(name, overflow="fold") for name in rows[0]))
        for row in rows:
            table.add_row(*(Text(row.get(name, "")) for name in rows[0]))
        console.print(table)
    counts = ", ".join(f"{split} {n:,}" for split, n in result["rows"].items())
    console.print(
        f"Rows: {counts}; duplicates dropped: {result['num_duplicates']:,}; "
        f"left out: {result['num_left_out']:,}",
        soft_wrap=True,
    )
    for head, labels in result["label_counts"].items():
        listed = ", ".join(f"{label} {n:,}" for label, n in labels.items())
        missing = result["missing_labels"].get(head, 0)
        console.print(
            f"Head {head}: {listed or 'no labels'}; without a label: {missing:,}", soft_wrap=True
        )
    for fault in result["faults"]:
        where = "" if fault["line"] is None else f"line {fault['line']}: "
        console.print(f"Error: {where}{fault['message']}", soft_wrap=True)
    for warning in result["warnings"]:
        console.print(f"Warning: {warning}", soft_wrap=True)
    console.print(f"To upload it:\n  {result['command']}", soft_wrap=True)


def _show(dataset: DatasetResponse, *, as_json: bool) -> None:
    if as_json:
        print_json(dataset)
        return
    table = Table.grid(padding=(0, 2))
    table.add_row("dataset", f"{dataset['id']} {dataset['name']}")
    table.add_row("rows", ", ".join(f"{split} {n:,}" for split, n in dataset["rows"].items()))
    for head in dataset["heads"]:
        counts = dataset["label_counts"].get(head["name"], {})
        labels = ", ".join(f"{label} {n:,}" for label, n in islice(counts.items(), _SHOWN_LABELS))
        if len(counts) > _SHOWN_LABELS:
            labels += f", and {len(counts) - _SHOWN_LABELS:,} more labels"
        table.add_row(f"head {head['name']}", f"{head['type']}: {labels}")
    for warning in dataset["warnings"]:
        table.add_row("warning", warning)
    Console(highlight=False).print(table)
