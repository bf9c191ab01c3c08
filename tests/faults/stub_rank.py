"""A stub rank without torch: six steps, with a checkpoint after every second one.

    python stub_rank.py RUN_DIR

It resumes from `resume_dir` as the real loops do. The job's name says when it kills itself in its
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
    run_input: dict[str, Any] = json.loads((run / "spec.json").read_text())
    name = run_input["spec"]["name"] if run_input["attempt"] == 1 else ""
    report_progress(run, phase="loading")
    step = checkpointed_step(run_input["resume_dir"])
    report_progress(run, phase="training", step=step)
    while step < STEPS:
        step += 1
        report_progress(run, phase="training", step=step, loss=0.5)
        if step % 2 == 0:
            report_progress(run, phase="saving", step=step)
            saved = run / "checkpoints" / f"step-{step:08d}"
            saved.mkdir(parents=True)
            (saved / "COMPLETE").touch()
            report_progress(run, phase="training")
        if name == f"killed_after_{step}":
            os.kill(os.getpid(), signal.SIGKILL)
    report_progress(run, phase="exporting")
    if name == "killed_in_export":
        os.kill(os.getpid(), signal.SIGKILL)
    export(run)
    report_progress(run, phase="finishing")


def checkpointed_step(directory: str | None) -> int:
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


def report_progress(run: Path, **fields: object) -> None:
    with (run / "progress.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time()} | fields) + "\n")


if __name__ == "__main__":
    main()
