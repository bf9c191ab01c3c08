"""`python -m tools.plan_errors`: errors of the plan against traced runs, as in docs/memory.md.

A trace is one dry run of a training step: exact peaks of allocated bytes on rank 0, by phase.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from services.shared.memory.architecture.shape import from_preset
from services.shared.memory.hardware import machine
from services.shared.memory.planning.ledger import PlanPhase
from services.shared.memory.planning.plan import Plan, plan
from services.shared.memory.recipe import Recipe

TRACES = Path("tests/data/memory/traces.json")

_PREFETCH = {"NO_PREFETCH": "none", "BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}


class TraceDict(TypedDict):
    """One traced run; what the plan does not read is left out."""

    name: str
    model: str
    ranks: int
    heads: list[int]
    fsdp: int
    reshard_after_forward: bool
    prefetch: str | None
    explicit_attention_mask: bool
    wrap: str
    embedding: str
    parameters: str
    compute: str
    reduce: str
    optimizer: str
    optimizer_impl: str
    optimizer_in_backward: bool
    activation_checkpointing: bool
    attention: str
    micro_batch: int
    sequence_length: int
    traced_peak_bytes: int
    traced_phase_peaks_bytes: dict[str, int]


@dataclass(frozen=True)
class TraceError:
    """One traced run and the plan's relative errors: of the peak, and of each phase by its name."""

    name: str
    traced_peak_bytes: int
    planned_peak_bytes: int
    phases: dict[str, float]

    @property
    def peak(self) -> float:
        """Relative error of the peak."""
        return self.planned_peak_bytes / self.traced_peak_bytes - 1


def trace_errors(traces: Sequence[TraceDict]) -> list[TraceError]:
    """Return the plan's errors on each of `traces`."""
    return [_trace_error(trace) for trace in traces]


def plan_of(trace: TraceDict) -> Plan:
    """Return the plan of the job that a trace ran."""
    reshard = trace["reshard_after_forward"]
    recipe = Recipe().with_changes(
        {
            "engine": f"fsdp{trace['fsdp']}",
            "sharding": "full" if reshard else "grad_op",
            "prefetch": _PREFETCH.get(trace["prefetch"] or "", "none"),
            "attention_mask": trace["explicit_attention_mask"],
            # SHARD_GRAD_OP was traced without original parameters, which are what keeps the
            # checkpoint's shards alive after an upcast.
            "upcast_after_wrap": reshard,
            "wrap": trace["wrap"],
            "embedding": trace["embedding"],
            "parameters": trace["parameters"],
            "compute": trace["compute"],
            "reduce": trace["reduce"],
            "optimizer": trace["optimizer"],
            "optimizer_impl": trace["optimizer_impl"],
            "optimizer_in_backward": trace["optimizer_in_backward"],
            "activation_checkpointing": trace["activation_checkpointing"],
            "attention": trace["attention"],
            "micro_batch": trace["micro_batch"],
            "sequence_length": trace["sequence_length"],
        }
    )
    shape = from_preset(trace["model"], heads=trace["heads"])
    # A dry run on a CPU takes the CPU's kernels.
    return plan(shape, recipe, machine("cpu", ranks=trace["ranks"]))


def table(errors: Sequence[TraceError]) -> str:
    """Return the errors as a Markdown table, and a last line with the largest."""
    head = "| run | traced peak (GiB) | plan (GiB) | peak | backward | optimizer step |"
    lines = [head, "|---|---:|---:|---:|---:|---:|"]
    for error in errors:
        backward = _largest(error, "bwd")
        optimizer = _largest(error, "opt")
        lines.append(
            f"| {error.name} | {error.traced_peak_bytes / 2**30:.4f} "
            f"| {error.planned_peak_bytes / 2**30:.4f} | {error.peak:+.4%} "
            f"| {backward} | {optimizer} |"
        )
    worst = max(abs(error.peak) for error in errors)
    lines += ["", f"{len(errors)} runs, largest error of a peak: {worst:.4%}"]
    return "\n".join(lines)


def _trace_error(trace: TraceDict) -> TraceError:
    planned = plan_of(trace)
    peaks: dict[str, int] = {}
    for point in planned.points:
        name = _phase_name(point.phase, point.step, point.micro_batch)
        if name:
            peaks[name] = max(peaks.get(name, 0), point.live_bytes)
    traced = trace["traced_phase_peaks_bytes"]
    return TraceError(
        name=trace["name"],
        traced_peak_bytes=trace["traced_peak_bytes"],
        planned_peak_bytes=planned.peak_bytes,
        phases={name: peaks[name] / traced[name] - 1 for name in traced if name in peaks},
    )


def _phase_name(phase: PlanPhase, step: int, micro_batch: int) -> str | None:
    """Return how traces call a phase: steps count from 0, `1.0bwd` is the second step's backward.

    Their `1opt` begins after gradients are freed, so it is another quantity.
    """
    if phase is PlanPhase.FORWARD:
        return f"{step - 1}.{micro_batch}fwd"
    if phase is PlanPhase.BACKWARD:
        return f"{step - 1}.{micro_batch}bwd"
    return "0opt" if phase is PlanPhase.OPTIMIZER_STEP and step == 1 else None


def _largest(error: TraceError, ending: str) -> str:
    found = [value for name, value in error.phases.items() if name.endswith(ending)]
    return f"{max(found, key=abs):+.4%}" if found else ""


def main() -> None:
    """Print the table for the file named, or for the traces of the tests."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TRACES
    sys.stdout.write(table(trace_errors(json.loads(path.read_text(encoding="utf-8")))) + "\n")


if __name__ == "__main__":
    main()
