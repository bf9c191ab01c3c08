"""`stillhouse doctor`: checks what works on this machine, and says how to fix what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from rich.table import Table

from services.cli.client import print_json
from services.cli.embedded.maintenance import DEFAULT_DATA_DIR, DataDir, running_environment
from services.cli.terminal import Console
from services.shared.launch.doctor.doctor import examine, to_json
from services.shared.launch.doctor.machine import Finding, Machine, Status

_MARKS = {
    Status.OK: "[green]ok[/green]",
    Status.WARNING: "[yellow]warning[/yellow]",
    Status.FAILED: "[red]failed[/red]",
    Status.NOT_APPLICABLE: "[dim]-[/dim]",
}


def doctor(
    with_torch: Annotated[
        bool, typer.Option("--torch/--no-torch", help="Also run the checks that need torch.")
    ] = True,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Check versions, devices, attention and collectives; exit with code 1 if a check fails."""
    machine = replace(Machine.detect(), env=running_environment(data_dir))
    console = Console(stderr=as_json, highlight=False, markup=True)
    with console.status("Examining this machine ..."):
        findings, measured = examine(machine, with_torch=with_torch)
    document = to_json(machine, findings, measured)
    if as_json:
        print_json(document)
    else:
        _print_findings(console, findings)
        for name, value in measured.items():
            console.print(f"measured  {name}: {value}", markup=False)
    if not document["healthy"]:
        raise typer.Exit(1)


def _print_findings(console: Console, findings: list[Finding]) -> None:
    table = Table(box=None, padding=(0, 1), show_header=False)
    for finding in findings:
        text = _escape(finding.detail)
        if finding.remedy:
            text += f"\n[bold]->[/bold] {_escape(finding.remedy)}"
        table.add_row(_MARKS[finding.status], _escape(finding.name), text)
    console.print(table)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
