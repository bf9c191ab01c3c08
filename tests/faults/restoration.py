"""Destroys a running platform and restores it from a backup that was made under load.

    python -m tests.faults.restoration --out .stillhouse/restoration

A student serves and jobs train while the backup is made; then every process gets SIGKILL and the whole data
directory, with the database, is removed. After `stillhouse restore` the platform must answer predictions as
before, its files must have the same hashes, and every job must end, those that ran from their checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from services.shared.jobs.state import JobState
from tests.faults.harness import PlatformHarness
from tests.faults.waiting import wait_until
from tests.faults.workload import Workload

TEXTS = ["it was clean", "it was dirty", "clean clean dirty"]


class Restoration:
    """One destruction and one restoration."""

    def __init__(self, out: Path) -> None:
        self.root, self.backups = out / "platform", out / "backups"
        self.harness = PlatformHarness(self.root, has_second_trainer=False)
        self.rng = random.Random(1)

    def run(self) -> dict[str, Any]:
        """Return what was measured. Raises AssertionError for what is not as before."""
        self.harness.start()
        before = self._populate()
        backups = [self._back_up(), self._back_up()]
        self._destroy()
        restored = self._stillhouse("restore", str(self.backups))
        self.harness = PlatformHarness(self.root, has_second_trainer=False)
        self.harness.start()
        try:
            after = self._state()
            differing = [
                name
                for name in before["files"]
                if after["files"].get(name) != before["files"][name]
            ]
            assert not differing, differing
            assert after["answers"] == before["answers"], (before["answers"], after["answers"])
            ended = self._finish(restored["requeued_jobs"])
        finally:
            self.harness.stop()
        return {
            "backups": [
                {
                    name: each[name]
                    for name in ("num_files", "num_bytes", "num_copied_files", "seconds")
                }
                for each in backups
            ],
            "rows": sum(backups[-1]["rows"].values()),
            "restore_seconds": restored["seconds"],
            "files_compared": len(before["files"]),
            **ended,
        }

    def _populate(self) -> dict[str, Any]:
        """Serve a student, and leave jobs running and queued; return the state of what does not change."""
        workload = self.workload = Workload(self.harness, self.rng)
        workload.submit("first", workload.spec("chain"))
        assert wait_until(self._chain_has_ended, seconds=300)
        student = self.harness.store.list_models(kind="distill").items[0]
        body = {"force": True, "reason": "the restoration needs a serving student"}
        httpx.post(f"{self.harness.url}/models/{student.id}/promote", json=body).raise_for_status()
        for number in range(4):
            spec = workload.spec("teacher", max_steps=400)
            workload.submit(f"long-{number}", spec)
        return self._state()

    def _chain_has_ended(self) -> bool:
        self.workload.poll()
        return len(self.workload.ended) == 2

    def _state(self) -> dict[str, Any]:
        """Return the hashes of datasets and models, and the answers of the student."""
        url = f"{self.harness.url}/predict"
        body = {"inputs": TEXTS, "raw_scores": True}
        assert wait_until(
            lambda: httpx.post(url, json=body, timeout=30).status_code == 200, seconds=180
        )
        settings = self.harness.settings
        models = {m.path for m in self.harness.store.list_models(limit=500).items}
        files = {
            path.relative_to(settings.data_dir).as_posix(): _sha256(path)
            for directory in (settings.datasets_dir, *models)
            for path in directory.rglob("*")
            if path.is_file()
        }
        return {"files": files, "answers": httpx.post(url, json=body, timeout=30).json()}

    def _back_up(self) -> dict[str, Any]:
        """Make a backup once a job has saved, while requests and jobs go on."""
        runs = self.harness.settings.runs_dir
        running = self._running()
        assert wait_until(
            lambda: any(runs.glob(f"{running}/*/checkpoints/step-*/COMPLETE")), seconds=180
        )
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                httpx.post(f"{self.harness.url}/predict", json={"inputs": TEXTS}, timeout=30)

        thread = threading.Thread(target=load)
        thread.start()
        try:
            return self._stillhouse("backup", str(self.backups))
        finally:
            stop.set()
            thread.join()

    def _running(self) -> str:
        found: list[str] = []

        def look() -> bool:
            jobs = self.harness.store.list_jobs(state=JobState.RUNNING).items
            found[:] = [job.id for job in jobs]
            return bool(found)

        assert wait_until(look, seconds=120)
        return found[0]

    def _destroy(self) -> None:
        """Kill every process at once and remove the data directory."""
        self.workload.close()
        platform, ranks = self.harness.platform, self.harness.rank_processes()
        self.harness._stopping.set()
        for pid in platform.pids.values():
            os.kill(pid, signal.SIGKILL)
        for rank in ranks:
            rank.process.kill()
        self.harness.stop()
        shutil.rmtree(platform.data_dir)

    def _stillhouse(self, *arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "services.cli.main", *arguments, "--json"]
        command += ["--data-dir", str(self.root / "data")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def _finish(self, requeued: list[str]) -> dict[str, Any]:
        """Wait until every job has ended; return how those that ran went on."""
        store = self.harness.store
        jobs = [job.id for job in store.list_jobs(limit=500).items]
        unfinished = [job for job in jobs if store.job(job).ended_at is None]
        assert set(requeued) <= set(unfinished)
        assert requeued
        assert wait_until(
            lambda: all(store.job(job).ended_at is not None for job in unfinished), seconds=900
        )
        states = {job: str(store.job(job).state) for job in unfinished}
        assert set(states.values()) == {"succeeded"}, states
        first_steps = {job: self._first_step(job) for job in requeued}
        assert all(step > 0 for step in first_steps.values()), first_steps
        return {"jobs_finished": len(unfinished), "resumed_at_step": list(first_steps.values())}

    def _first_step(self, job_id: str) -> int:
        attempt = self.harness.store.job(job_id).attempt
        progress = self.harness.settings.run_dir(job_id, attempt) / "progress.jsonl"
        steps = [json.loads(line).get("step") for line in progress.read_text().splitlines()]
        return next(int(step) for step in steps if step is not None)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Destroy, restore, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".stillhouse/restoration"))
    options = parser.parse_args()
    out = options.out.resolve() / time.strftime("%m%d-%H%M%S")
    print(json.dumps(Restoration(out).run(), indent=1))


if __name__ == "__main__":
    main()
