"""Prints a trace: each phase with its planned peak, and what was alive at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypedDict

from rich.table import Table

from services.cli.terminal import Console
from services.shared.memory.planning.plan import Plan
from services.shared.memory.sizes import format_size


class AliveDict(TypedDict):
    """Storages of one origin that were alive at the peak."""

    what: str
    since: str
    count: int
    size_bytes: int


class TracedPhaseDict(TypedDict):
    """The peak of one phase, and the largest request made in it."""

    phase: str
    step: int
    micro_batch: int
    peak_bytes: int
    request_bytes: int
    request: str


class TraceDict(TypedDict):
    """A trace as JSON; see `training.dry_run.trace.Trace`."""

    rank: int
    engine: str
    torch: str
    real: bool
    seconds: float
    peak_bytes: int
    phases: list[TracedPhaseDict]
    alive: list[AliveDict]


class TracedRow(Protocol):
    """One phase, traced and planned."""

    @property
    def phase(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def traced_bytes(self) -> int: ...
    @property
    def planned_bytes(self) -> int: ...
    @property
    def request(self) -> str: ...
    @property
    def request_bytes(self) -> int: ...
    @property
    def error(self) -> float | None: ...


def show_trace(
    console: Console,
    found: TraceDict,
    rows: Sequence[TracedRow],
    planned: Plan,
    *,
    budget_bytes: int,
) -> None:
    """Print a trace with its rows; `budget_bytes` is that of the requested device."""
    kind = "real run" if found["real"] else "dry run"
    console.print(
        f"[bold]{planned.shape.name}[/bold] on {planned.hardware.ranks} ranks, rank {found['rank']}: "
        f"{kind} of the training step with {found['engine']}, torch {found['torch']}, "
        f"{found['seconds']:.0f} s"
    )
    error = planned.peak_bytes / found["peak_bytes"] - 1
    verdict = "fits" if found["peak_bytes"] <= budget_bytes else "does not fit"
    console.print(
        f"peak {format_size(found['peak_bytes'])}, planned {format_size(planned.peak_bytes)} "
        f"({error:+.4%}); {verdict} a budget of {format_size(budget_bytes)}"
    )
    console.print(_phases(rows))
    console.print(_alive(found["alive"], found["peak_bytes"]))


def _phases(rows: Sequence[TracedRow]) -> Table:
    table = Table(
        "phase", "step", "traced", "planned", "error", "largest request", title="Peaks by phase"
    )
    for row in rows:
        step = f"{row.step}.{row.micro_batch + 1}" if row.micro_batch else str(row.step or "")
        planned = format_size(row.planned_bytes) if row.planned_bytes else ""
        error = f"{row.error:+.3%}" if row.error is not None else ""
        request = f"{format_size(row.request_bytes)} {row.request}" if row.request_bytes else ""
        table.add_row(row.phase, step, format_size(row.traced_bytes), planned, error, request)
    return table


def _alive(alive: Sequence[AliveDict], peak_bytes: int) -> Table:
    table = Table("made by", "in", "storages", "bytes", "of the peak", title="Largest at the peak")
    for entry in alive:
        table.add_row(
            entry["what"],
            entry["since"],
            str(entry["count"]),
            format_size(entry["size_bytes"]),
            f"{entry['size_bytes'] / peak_bytes:.1%}",
        )
    return table
