"""`stillhouse diagnose`: diagnose an out-of-memory failure from a case or a log."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from services.cli.terminal import Console, printable
from services.cli.views.diagnosis import show_diagnosis
from services.cli.views.diagnosis_tables import show_everything
from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose as diagnose_case
from services.shared.memory.oom_log.log_scanner import LogReading, read_log
from services.shared.memory.sizes import parse_size

_INVALID_INPUT = 2  # the exit code that Typer itself uses for a bad option
# A case is a few fields and an excerpt of a log; anything larger is a log, and is streamed.
_LARGEST_CASE_BYTES = 16 << 20
_NARROWEST = 110


def diagnose(
    source: Annotated[
        Path | None,
        typer.Argument(help="A case as JSON, or a log of any size; standard input if left out."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model by name, such as Qwen3-32B.")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Classes of each classifier head, such as 3,7.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks.")] = None,
    device: Annotated[str | None, typer.Option(help="Kind of accelerator, as free text.")] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of one device, such as 65520MiB or 64GiB.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="Memory of the host.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Sharding strategy, such as 'FSDP1 full_shard' or ZeRO-2.")
    ] = None,
    wrap_policy: Annotated[str | None, typer.Option(help="Wrap policy, as free text.")] = None,
    precision: Annotated[str | None, typer.Option(help="Precision, as free text.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Optimizer, such as adamw_torch_fused.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Texts of a micro-batch.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of a text.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches of a step.")] = None,
    activation_checkpointing: Annotated[
        bool | None, typer.Option(help="Whether activations were recomputed.")
    ] = None,
    offload: Annotated[str | None, typer.Option(help="none, optimizer or all.")] = None,
    phase: Annotated[
        str | None, typer.Option(help="Phase in which it failed, as free text.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step it failed in.")] = None,
    exit_code: Annotated[int | None, typer.Option(help="Exit code of the failed rank.")] = None,
    torch: Annotated[str | None, typer.Option(help="Version of torch.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Print every explanation, change and note.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Diagnose an out-of-memory failure: which tensor, whether sharding was active, what to change."""
    stated = {
        "model_name": model,
        "heads": [int(n) for n in heads.split(",") if n.strip().isdigit()] if heads else None,
        "ranks": ranks,
        "device": device,
        "sharding_strategy": strategy,
        "wrap_policy": wrap_policy,
        "precision": precision,
        "optimizer": optimizer,
        "micro_batch": micro_batch,
        "sequence_length": sequence_length,
        "accumulate": accumulate,
        "activation_checkpointing": activation_checkpointing,
        "offload": offload,
        "phase": phase,
        "step": step,
        "exit_code": exit_code,
        "versions": {"torch": torch} if torch else None,
    }
    try:
        stated["device_memory_bytes"] = _size(device_memory, "device_memory")
        stated["host_memory_bytes"] = _size(host_memory, "host_memory")
        content, log = _read(source)
        case = Case.from_dict({**content, **{k: v for k, v in stated.items() if v is not None}})
        diagnosis = diagnose_case(case, log=log)
    except InvalidInput as error:
        _refuse(error, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
        return
    console = Console()
    width = console.width if console.is_terminal else max(console.width, _NARROWEST)
    show = show_everything if everything else show_diagnosis
    show(Console(width=width), diagnosis)


def _size(text: str | None, field: str) -> int | None:
    return parse_size(text, field=field) if text else None


def _read(source: Path | None) -> tuple[dict[str, Any], LogReading | None]:
    """Return the case's fields and, where the source is a log, what was read of it."""
    if source is None:
        # At a terminal nothing is piped in: the options are the whole case.
        return {}, None if sys.stdin.isatty() else read_log(sys.stdin.buffer)
    if not source.is_file():
        raise InvalidInput("source", f"there is no file {source}")
    with source.open("rb") as file:
        start = file.read(256).lstrip()
        file.seek(0)
        if start.startswith(b"{") and source.stat().st_size <= _LARGEST_CASE_BYTES:
            content = _as_case(file.read())
            if content is not None:
                return content, None
            file.seek(0)
        return {}, read_log(file)


def _as_case(raw: bytes) -> dict[str, Any] | None:
    """Return the fields of a case, or None for a log that begins with a brace."""
    try:
        content = json.loads(raw)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _refuse(error: InvalidInput, *, as_json: bool) -> NoReturn:
    if as_json:
        problem = {"field": error.field, "problem": error.problem, "accepted": error.accepted}
        typer.echo(json.dumps({"error": problem}))
    typer.echo(printable(f"stillhouse diagnose: {error}"), err=True)
    raise typer.Exit(_INVALID_INPUT)
