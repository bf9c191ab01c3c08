"""`stillhouse predict`: classifies a few texts with the promoted student, or labels a whole file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from services.cli.bulk_predict import LabellingFailed, count_lines, label_file
from services.cli.client import (
    DEFAULT_URL,
    TIMEOUT_SECONDS,
    ApiKey,
    AsJson,
    Url,
    open_client,
    print_json,
)
from services.cli.responses import PredictResponse
from services.cli.terminal import Console


def predict(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to classify.")] = None,
    text_pairs: Annotated[
        list[str] | None,
        typer.Option(
            "--text-pair",
            help="The second text of a pair, for a model of pairs; once for each text.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            help="Label every line of this file: one text per line, or JSONL with `text`, with `text` and "
            "`text_pair`, or with `messages`.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The JSONL file to write for --file; an incomplete one is continued."
        ),
    ] = None,
    alias: Annotated[
        str, typer.Option("--alias", help="The alias that serves the student.")
    ] = "default",
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Truncate texts that are longer than the model's maximum."),
    ] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Classify texts with the promoted student, or label a file."""
    if bool(texts) == (file is not None) or (file is None) != (out is None):
        raise typer.BadParameter("give texts, or --file with --out")
    if text_pairs and len(text_pairs) != len(texts or []):
        raise typer.BadParameter(
            f"{len(texts or [])} texts and {len(text_pairs)} --text-pair: give one for each text"
        )
    if file is not None and out is not None:
        _label_file(file, out, url, api_key, alias=alias, truncate=truncate, as_json=as_json)
        return
    inputs: list[Any] = list(texts or [])
    if text_pairs:
        inputs = [list(pair) for pair in zip(inputs, text_pairs, strict=True)]
    body = {"inputs": inputs, "truncate": truncate, "detail": True}
    with open_client(url, api_key, as_json=as_json) as client:
        response: PredictResponse = client.post("/predict", params={"alias": alias}, json=body)
    if as_json:
        print_json(response)
    else:
        _print_table(response, texts or [])


def _print_table(response: PredictResponse, texts: list[str]) -> None:
    heads = list(response["data"][0]["heads"])
    table = Table("text", *heads, caption=f"{response['model']} {response['version']}")
    for text, prediction in zip(texts, response["data"], strict=True):
        cells = (
            f"{prediction['heads'][h]['label']} {prediction['heads'][h]['score']:.3f}"
            for h in heads
        )
        table.add_row(text if len(text) <= 60 else text[:59] + "…", *cells)
    Console().print(table)


def _label_file(
    file: Path,
    out: Path,
    url: str,
    api_key: str | None,
    *,
    alias: str,
    truncate: bool,
    as_json: bool,
) -> None:
    console = Console(stderr=True)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS) as client, bar:
            task = bar.add_task(f"Labelling {file.name}", total=count_lines(file))
            result = label_file(
                file,
                out,
                client=client,
                alias=alias,
                truncate=truncate,
                on_progress=lambda lines: bar.update(task, completed=lines),
            )
    except (LabellingFailed, OSError) as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    if as_json:
        print_json({"out": str(out), **dataclasses.asdict(result)})
        return
    resumed = f", continued at line {result.resumed_at + 1}" if result.resumed_at else ""
    refused = f"; {result.refused} were rejected and hold an error" if result.refused else ""
    Console().print(f"{out}: {result.lines} lines labelled{resumed}{refused}.", highlight=False)
