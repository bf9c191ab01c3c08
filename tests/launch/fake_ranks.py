"""Stands in for torchrun and its ranks: RUN_DIR BEHAVIOUR; standard library alone, starts at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    run, behaviour = Path(sys.argv[1]), sys.argv[2]
    (run / "ranks" / "0").mkdir(parents=True, exist_ok=True)
    globals()[behaviour](run)


def succeed(run: Path) -> None:
    for step in (1, 2):
        line = {"time": time.time(), "phase": "training", "step": step, "loss": 1.0 / step}
        with (run / "progress.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    peaks = {"time": 0, "phase": "forward", "peak_allocated_bytes": 7, "observed": {"units": 3}}
    (run / "ranks" / "0" / "memory.jsonl").write_text(json.dumps(peaks) + "\n")
    (run / "export").mkdir()
    (run / "export" / "manifest.json").write_text("{}")
    (run / "checkpoints" / "step_2").mkdir(parents=True)
    report = {"outcome": "succeeded", "steps": 2, "artifact": "export", "parameters": 5}
    (run / "report.json").write_text(json.dumps(report))


def save_when_asked(run: Path) -> None:
    while not (run / "stop.json").exists():
        time.sleep(0.02)
    reason = json.loads((run / "stop.json").read_text())["reason"]
    (run / "report.json").write_text(json.dumps({"outcome": "stopped", "stop_reason": reason}))


def ignore_everything(run: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (run / "pids").write_text(json.dumps([os.getpid(), child.pid]))
    while True:
        time.sleep(0.1)


def leave_an_orphan(run: Path) -> None:
    orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (run / "pids").write_text(json.dumps([orphan.pid]))
    sys.exit(1)


def exhaust_memory(run: Path) -> None:
    cgroup = os.environ.get("FAKE_CGROUP")
    if cgroup:
        (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    (run / "in_cgroup").touch()
    while not (run / "go").exists():
        time.sleep(0.02)
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20) * 16))


if __name__ == "__main__":
    main()
