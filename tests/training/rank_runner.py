"""Run every check on the ranks that torchrun starts: DIRECTORY [NAME...]; rank 0 writes NAME.json."""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

from services.shared.jobs.run_directory import RunDirectory, write_json
from services.shared.training.process import join, leave
from tests.training import memory_probe_checks
from tests.training.checkpoint import checkpoint_checks
from tests.training.optim import optimizer_checks
from tests.training.rank_checks import CHECKS
from tests.training.sharding import export_checks, load_checks, shard_checks

# Importing them has registered their checks.
MODULES = (
    shard_checks,
    load_checks,
    export_checks,
    optimizer_checks,
    checkpoint_checks,
    memory_probe_checks,
)


def main() -> None:
    root = Path(sys.argv[1])
    wanted = sys.argv[2:] or list(CHECKS)
    world = join(RunDirectory(root), device="cpu", seed=0)
    for name in wanted:
        began = time.monotonic()
        directory = root / name
        directory.mkdir(exist_ok=True)
        world.barrier()
        try:
            result = CHECKS[name](world, directory)
        except Exception:
            # The other rank may wait in a collective for ever: end both, with the first error.
            path = root / f"{name}.json"
            if not path.exists():
                write_json(path, {"error": traceback.format_exc()})
            raise
        if world.is_first:
            write_json(root / f"{name}.json", {"result": result})
            print(f"{time.monotonic() - began:6.2f} s {name}", flush=True)
    leave()


if __name__ == "__main__":
    main()
