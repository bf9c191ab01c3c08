"""A rank without torch that trains six steps with a checkpoint after each second one: RUN_DIR.

It goes on from `resume_dir` as the real loops do. The job's name says when it kills itself in its
first attempt: `killed_after_<step>` or `killed_in_export`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 6


def main() -> None:
    run = Path(sys.argv[1])
    given: dict[str, Any] = json.loads((run / "spec.json").read_text())
    name = given["spec"]["name"] if given["attempt"] == 1 else ""
    tell(run, phase="loading")
    step = resumed(given["resume_dir"])
    tell(run, phase="training", step=step)
    while step < STEPS:
        step += 1
        tell(run, phase="training", step=step, loss=0.5)
        if step % 2 == 0:
            tell(run, phase="saving", step=step)
            saved = run / "checkpoints" / f"step-{step:08d}"
            saved.mkdir(parents=True)
            (saved / "COMPLETE").touch()
            tell(run, phase="training")
        if name == f"killed_after_{step}":
            os.kill(os.getpid(), signal.SIGKILL)
    tell(run, phase="exporting")
    if name == "killed_in_export":
        os.kill(os.getpid(), signal.SIGKILL)
    export(run)
    tell(run, phase="finishing")


def resumed(directory: str | None) -> int:
    places = Path(directory).glob("step-*/COMPLETE") if directory else []
    return max((int(place.parent.name.removeprefix("step-")) for place in places), default=0)


def export(run: Path) -> None:
    (run / "export").mkdir()
    (run / "export" / "weights").write_bytes(b"weights")
    files = {"weights": hashlib.sha256(b"weights").hexdigest()}
    manifest = json.dumps({"files": files}).encode()
    (run / "export" / "manifest.json").write_bytes(manifest)
    report = {
        "outcome": "succeeded",
        "artifact": "export",
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
        "evaluation": {"heads": {"mood": {"macro_f1": 0.9}}},
    }
    (run / "report.json").write_text(json.dumps(report))


def tell(run: Path, **fields: object) -> None:
    with (run / "progress.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time()} | fields) + "\n")


if __name__ == "__main__":
    main()
