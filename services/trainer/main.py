"""One rank of a teacher job: `torchrun --nproc-per-node N -m services.trainer.main RUN_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

from services.shared.jobs.run_directory import RunDirectory
from services.shared.training.process import Position, join, leave, read_run_input, report_failures
from services.trainer.finetune import finetune


def main() -> None:
    """Join the process group, train and leave; a failure is written to the run directory."""
    run, position = RunDirectory(Path(sys.argv[1])), Position()
    with report_failures(run, position):
        task = read_run_input(run)
        world = join(run, device=task.spec.resources.device, seed=task.spec.training.seed)
        finetune(run, task, world, position)
        leave()


if __name__ == "__main__":
    main()
