"""Ranks without torch, started by a real torchrun: RUN_DIR. The name of the job selects what they do."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    run = Path(sys.argv[1])
    given = json.loads((run / "spec.json").read_text())
    report(run, phase="loading")
    globals()[given["spec"]["name"]](run, given)


def report(run: Path, **fields: object) -> None:
    with (run / "progress.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time()} | fields) + "\n")


def succeed(run: Path, given: dict[str, Any]) -> None:
    report(run, phase="training", step=1, total_steps=2, loss=0.7)
    scores = {"heads": {"sentiment": {"macro_f1": 0.9, "accuracy": 0.9}}}
    report(run, phase="evaluating", evaluation=scores)
    (run / "checkpoints" / "step-2").mkdir(parents=True)
    (run / "export").mkdir()
    (run / "export" / "manifest.json").write_text("{}")
    heads = [{"name": "sentiment", "type": "single_label", "labels": ["negative", "positive"]}]
    result = {
        "outcome": "succeeded",
        "artifact": "export",
        "heads": heads,
        "parameters": 10,
        "size_bytes": 40,
        "evaluation": scores,
    }
    (run / "report.json").write_text(json.dumps(result))


def claim_success_without_an_artifact(run: Path, given: dict[str, Any]) -> None:
    (run / "report.json").write_text(json.dumps({"outcome": "succeeded"}))


def stop_when_asked(run: Path, given: dict[str, Any]) -> None:
    report(run, phase="training", step=1)
    while not (run / "stop.json").exists():
        time.sleep(0.02)
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    reason = json.loads((run / "stop.json").read_text())["reason"]
    (run / "report.json").write_text(json.dumps({"outcome": "stopped", "stop_reason": reason}))


def be_killed(run: Path, given: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exhaust_host_memory(run: Path, given: dict[str, Any]) -> None:
    (Path(os.environ["FAKE_CGROUP"]) / "cgroup.procs").write_text(str(os.getpid()))
    (run / "in_cgroup").touch()
    while not (run / "go").exists():
        time.sleep(0.02)
    held: list[bytearray] = []
    while True:
        held.append(bytearray(os.urandom(1 << 20) * 16))


def run_out_of_memory_once(run: Path, given: dict[str, Any]) -> None:
    if given["recipe"]["optimizer_in_backward"]:
        succeed(run, given)
        return
    failure = {
        "time": time.time(),
        "rank": 0,
        "phase": "forward",
        "step": 1,
        "reason": "device_out_of_memory",
        "message": "HIP out of memory. Tried to allocate 932.00 MiB.",
        "error_type": "OutOfMemoryError",
    }
    (run / "ranks" / "0").mkdir(parents=True)
    (run / "ranks" / "0" / "failure.json").write_text(json.dumps(failure))
    sys.exit(1)


if __name__ == "__main__":
    main()
