"""Prints which devices hold which model, the least loss of fidelity first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.padding import Padding
from rich.text import Text

from services.cli.terminal import Console
from services.shared.memory.planning.alternatives import Alternative
from services.shared.memory.planning.capacity import num_nodes
from services.shared.memory.sizes import format_size


def show_capacity(console: Console, fits: Sequence[Alternative], *, devices_per_node: int) -> None:
    """Print for each recipe the model, its devices and nodes, the peak of each, and what it costs."""
    for fit in fits:
        plan, nodes = fit.plan, num_nodes(fit, devices_per_node=devices_per_node)
        text = Text(
            f"{plan.shape.name} on {plan.hardware.ranks} x {plan.hardware.device.name}",
            style="bold",
        )
        text.append(
            f" ({nodes} {'node' if nodes == 1 else 'nodes'} of {devices_per_node}): "
            f"{format_size(plan.peak_bytes)} of {format_size(plan.budget_bytes)} each, "
            f"{str(plan.verdict).replace('_', ' ')}",
            style="not bold",
        )
        console.print(text)
        console.print(Padding(fit.change or "the recipe as given", (0, 0, 0, 2)))
        if fit.costs:
            console.print(Padding(Text(f"costs: {fit.costs}", style="dim"), (0, 0, 0, 2)))
