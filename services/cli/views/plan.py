"""Prints a memory plan: bars against the budget, what is alive at the peak, what would fit."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from services.cli.terminal import Console
from services.shared.memory.planning.alternatives import Alternative
from services.shared.memory.planning.plan import Plan
from services.shared.memory.planning.plan_contract import Verdict
from services.shared.memory.recipe import Recipe
from services.shared.memory.sizes import format_size

_BAR_WIDTH = 16
_STYLES = {
    Verdict.FITS: "green",
    Verdict.TIGHT: "yellow",
    Verdict.DOES_NOT_FIT: "red",
    Verdict.UNKNOWN: "dim",
}
_WORDS = {
    Verdict.FITS: "fits",
    Verdict.TIGHT: "tight",
    Verdict.DOES_NOT_FIT: "does not fit",
    Verdict.UNKNOWN: "unknown",
}


def show_plan(
    console: Console,
    plan: Plan,
    alternatives: Sequence[Alternative],
    refused: Sequence[Alternative] = (),
) -> None:
    """Print `plan`, the alternatives that would fit, and the offloads that exceed host memory."""
    console.print(_headline(plan))
    console.print(_verdict_line(plan))
    console.print(_phases(plan))
    console.print(_components(plan))
    crossing = plan.first_exceeding(plan.budget_bytes)
    if crossing is not None:
        point = crossing.point
        place = point.unit if point.layer is None else f"{point.unit} {point.layer}"
        console.print(
            f"Fails in {point.phase} of step {point.step}, {place}: "
            f"{format_size(crossing.allocated_bytes)} allocated, "
            f"{format_size(crossing.request_bytes)} more requested ({crossing.what})."
        )
    console.print(_host_line(plan))
    if alternatives:
        console.print(_alternatives(plan, alternatives))
    elif not plan.runs:
        console.print("No change of the recipe makes it fit this hardware.")
    for offload in refused:
        console.print(
            f"Refused: {offload.change} would take {format_size(offload.plan.host.peak_bytes)} "
            f"of the host's {format_size(plan.hardware.host_memory_bytes or 0)}."
        )


def _headline(plan: Plan) -> Text:
    recipe, hardware = plan.recipe, plan.hardware
    text = Text(f"{plan.shape.name}", style="bold")
    text.append(f"  {plan.shape.num_parameters / 1e9:.3f} B parameters", style="not bold")
    text.append(
        f" on {hardware.ranks} x {hardware.device.name}\n{_recipe_line(recipe)}", style="not bold"
    )
    return text


def _recipe_line(recipe: Recipe) -> str:
    parts = [
        f"{recipe.engine} {recipe.sharding}",
        f"{recipe.parameters} state, {recipe.compute} compute",
        f"{recipe.optimizer} {recipe.optimizer_impl}",
        f"{recipe.micro_batch} x {recipe.sequence_length} tokens",
        f"{recipe.attention} attention",
    ]
    if recipe.accumulate > 1:
        parts.append(f"{recipe.accumulate} micro-batches a step")
    if recipe.optimizer_in_backward:
        parts.append("optimizer in backward")
    if recipe.activation_checkpointing:
        parts.append("activation checkpointing")
    return ", ".join(parts)


def _verdict_line(plan: Plan) -> Text:
    device = plan.hardware.device
    text = Text(_WORDS[plan.verdict], style=f"bold {_STYLES[plan.verdict]}")
    text.append(
        f": peak {format_size(plan.peak_bytes)} a rank, budget {format_size(plan.budget_bytes)} "
        f"({format_size(device.memory_bytes)} less {format_size(device.reserve_bytes)} for context, "
        f"collectives and workspaces, give or take {format_size(device.uncertainty_bytes)})",
        style="not bold default",
    )
    return text


def _phases(plan: Plan) -> Table:
    table = Table("phase", "peak", "of the budget", "at", title="By phase", title_justify="left")
    for phase, point in plan.phase_peaks.items():
        place = point.unit if point.layer is None else f"{point.unit} {point.layer}"
        step = f"step {point.step}, " if point.step else ""
        over = point.live_bytes > plan.budget_bytes
        table.add_row(
            str(phase),
            format_size(point.live_bytes),
            _bar(point.live_bytes, plan.budget_bytes, style="red" if over else "green"),
            f"{step}{place}: {point.what}",
        )
    return table


def _components(plan: Plan) -> Table:
    title = f"At the peak ({plan.peak_phase} of step {plan.peak.step})"
    table = Table("alive", "bytes", "of the peak", title=title, title_justify="left")
    for name, size in plan.components._asdict().items():
        if size:
            words = name.replace("_", " ")
            table.add_row(words, format_size(size), _bar(size, plan.peak_bytes, style="cyan"))
    table.add_row("sum", format_size(plan.peak_bytes), "", style="bold")
    return table


def _host_line(plan: Plan) -> Text:
    parts = [f"{name} {format_size(size)}" for name, size in plan.host._asdict().items() if size]
    memory = plan.hardware.host_memory_bytes
    of = f" of {format_size(memory)}" if memory is not None else ""
    text = Text("host ")
    text.append(_WORDS[plan.host_verdict], style=_STYLES[plan.host_verdict])
    text.append(f": peak {format_size(plan.host.peak_bytes)}{of} ({', '.join(parts)})")
    return text


def _alternatives(plan: Plan, alternatives: Sequence[Alternative]) -> Table:
    title = "What would fit, least loss of fidelity first"
    table = Table("change", "peak", "of the budget", "costs", title=title, title_justify="left")
    for offered in alternatives:
        table.add_row(
            offered.change,
            format_size(offered.plan.peak_bytes),
            _bar(offered.plan.peak_bytes, plan.budget_bytes, style=_STYLES[offered.plan.verdict]),
            offered.costs,
        )
    return table


def _bar(size: int, whole: int, *, style: str) -> Text:
    """Return a bar of `size` against `whole`, cut off at the whole."""
    share = size / whole
    filled = round(min(share, 1.0) * _BAR_WIDTH)
    text = Text("█" * filled, style=style)
    text.append("·" * (_BAR_WIDTH - filled), style="dim")
    text.append(f" {share:6.1%}", style=style if share > 1 else "default")
    return text
