"""`stillhouse predict`: ask the promoted student about a few texts, or label a whole file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from services.cli.labelling import LabellingFailed, count_lines, label_file

TIMEOUT_SECONDS = 120.0  # a busy API answers 429 long before


def predict(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to classify.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", help="Label every line of this file (one text a line, or JSONL with `text`)."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="JSONL written for --file; an unfinished one is continued."),
    ] = None,
    alias: Annotated[str, typer.Option("--alias", help="Which promoted student.")] = "default",
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are longer than the model reads.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for machines.")] = False,
    url: Annotated[
        str, typer.Option("--url", envvar="STILLHOUSE_URL", help="Where the API listens.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="STILLHOUSE_API_KEY", help="If it asks for one."),
    ] = None,
) -> None:
    """Classify texts with the promoted student, or label a whole file."""
    console = Console(stderr=True)
    if bool(texts) == (file is not None) or (file is None) != (out is None):
        console.print("Give texts, or --file with --out.")
        raise typer.Exit(2)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS) as client:
            if file is not None and out is not None:
                _label(file, out, client=client, alias=alias, truncate=truncate, as_json=as_json)
            else:
                body = {"inputs": texts, "truncate": truncate, "detail": True}
                _print(_ask(client, body, alias=alias), texts or [], as_json=as_json)
    except (LabellingFailed, OSError) as error:
        console.print(f"predict: {error}", markup=False)
        raise typer.Exit(1) from error


def _ask(client: httpx.Client, body: dict[str, Any], *, alias: str) -> dict[str, Any]:
    try:
        response = client.post("/predict", params={"alias": alias}, json=body)
        answer: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise LabellingFailed(f"{client.base_url} does not answer: {error}") from error
    if response.status_code != httpx.codes.OK:
        raise LabellingFailed(str(answer.get("detail") or answer.get("title")))
    return answer


def _print(answer: dict[str, Any], texts: list[str], *, as_json: bool) -> None:
    if as_json:
        json.dump(answer, sys.stdout, ensure_ascii=False, indent=2)
        sys.stdout.write("\n")
        return
    heads = list(answer["data"][0]["heads"])
    table = Table("text", *heads, caption=f"{answer['model']} {answer['version']}")
    for text, found in zip(texts, answer["data"], strict=True):
        cells = (f"{found['heads'][h]['label']} {found['heads'][h]['score']:.3f}" for h in heads)
        table.add_row(text if len(text) <= 60 else text[:59] + "…", *cells)
    Console().print(table)


def _label(
    file: Path, out: Path, *, client: httpx.Client, alias: str, truncate: bool, as_json: bool
) -> None:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task(f"Labelling {file.name}", total=count_lines(file))
        result = label_file(
            file,
            out,
            client=client,
            alias=alias,
            truncate=truncate,
            on_lines=lambda lines: bar.update(task, completed=lines),
        )
    summary = {
        "out": str(out),
        "lines": result.lines,
        "resumed_at": result.resumed_at,
        "refused": result.refused,
    }
    if as_json:
        sys.stdout.write(json.dumps(summary) + "\n")
        return
    went_on = f", continued at line {result.resumed_at + 1}" if result.resumed_at else ""
    refused = f"; {result.refused} hold an error instead" if result.refused else ""
    Console().print(f"{out}: {result.lines} lines labelled{went_on}{refused}.", highlight=False)
