"""What is found out before the ranks start: `python -m services.shared.training.prepare RUN_DIR`.

The worker runs it with the threads of one rank where a spec leaves the number format of a CPU open or trims
a vocabulary, and makes the plan again with what it finds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from services.shared.jobs.planning.auto_choices import processor_name
from services.shared.jobs.run_directory import (
    LayerSize,
    MatmulTimes,
    Prepared,
    RunDirectory,
    RunInput,
    write_json,
)
from services.shared.training.process import Position, read_run_input, report_failures
from services.shared.training.vocabulary import trim_vocabulary_of

TOKENS = 256  # of a micro-batch; more change the ratio by a few per cent
BUDGET_SECONDS = 0.8  # of all measurements together
ROUNDS = 4  # of both formats by turns, so that other load meets both


def prepare(run: RunDirectory, task: RunInput) -> Prepared:
    """Measure and count what the run input asks for."""
    source = task.spec.model if task.spec.kind == "teacher" else task.spec.student
    times = None if task.measure is None else measure_matmuls(task.measure)
    if not source.trim_vocabulary:
        return Prepared(times=times)
    report = trim_vocabulary_of(run, task).report
    return Prepared(
        times=times,
        vocabulary_rows=report.rows,
        vocabulary_rows_before=report.rows_before,
    )


def measure_matmuls(size: LayerSize) -> MatmulTimes:
    """Return the fastest step through the two matrices of a layer, in float32 and in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (TOKENS, size.hidden),
        (size.intermediate, size.hidden),
        (size.hidden, size.intermediate),
    ]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    operands = {dtype: [v.to(dtype).requires_grad_() for v in values] for dtype in best}
    deadline = time.perf_counter() + BUDGET_SECONDS
    for number in range(ROUNDS + 1):
        for dtype, (texts, up, down) in operands.items():
            seconds = _step_seconds(texts, up, down)
            if number:  # the first one compiles kernels
                best[dtype] = min(best[dtype], seconds)
        if number and time.perf_counter() > deadline:
            break
    return MatmulTimes(
        processor=processor_name(),
        threads=torch.get_num_threads(),
        size=size,
        tokens=TOKENS,
        float32_seconds=best[torch.float32],
        bfloat16_seconds=best[torch.bfloat16],
    )


def _step_seconds(texts: Tensor, up: Tensor, down: Tensor) -> float:
    started = time.perf_counter()
    linear(linear(texts, up), down).sum().backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - started


def main() -> None:
    """Prepare one run; a failure is written to the run directory."""
    run, position = RunDirectory(Path(sys.argv[1])), Position()
    with report_failures(run, position):
        write_json(run.prepared, prepare(run, read_run_input(run)))


if __name__ == "__main__":
    main()
