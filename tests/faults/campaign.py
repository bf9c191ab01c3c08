"""Injects random faults into one long-lived platform and checks the result of every job.

    python -m tests.faults.campaign --draws 300 --seed 7 --out .stillhouse/faults

The seed determines faults, phases and delays; when a job reaches a phase depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from services.shared.jobs.state import Reason
from tests.faults.availability import AvailabilityMonitor
from tests.faults.fault_catalogue import FAULTS, Fault, FaultContext, draw_schedule
from tests.faults.harness import PlatformHarness, mount_volume
from tests.faults.invariants import EXPECTED_REASONS, check_job
from tests.faults.report import Draw, print_table, summarise
from tests.faults.waiting import wait_until
from tests.faults.workload import JobSnapshot, TrackedJob, Workload

IN_FLIGHT = 6
PHASE_SECONDS = 20  # how long a draw waits for a job to reach its phase
ORPHAN_SECONDS = (
    30  # how long a process may outlive its attempt, until a disconnected worker notices
)
DRAIN_SECONDS = 900
MAX_TRIES = 2  # a job may leave its phase before the fault is injected


class Campaign:
    """The platform, its jobs, the draws, and the violations found."""

    def __init__(self, out: Path, *, seed: int, only: Sequence[str] = ()) -> None:
        self.out = out
        self.faults = [fault for fault in FAULTS if not only or fault.name in only]
        self.rng = random.Random(seed)
        self.seed = seed
        self.violations: list[dict[str, Any]] = []
        self.draws: list[Draw] = []
        self.ends: Counter[str] = Counter()
        self.resumed = self.restarted = self.attempts = 0

    def run(self, count: int) -> None:
        """Start the platform, promote a student, inject `count` faults, drain, and check every job."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.harness = PlatformHarness(self.out)
        volume = mount_volume(self.out / "data")
        try:
            self.harness.start()
            self._prepare(volume)
            self._draw_all(count)
            self._drain()
        finally:
            if hasattr(self, "workload"):
                self.workload.close()
            self.harness.stop()
            self._check_for_processes_after_the_end()
            if volume is not None:
                subprocess.run(["umount", "-l", str(volume)], check=False)

    def report(self) -> dict[str, Any]:
        """Return the report as JSON."""
        jobs = {
            "jobs": dict(self.ends),
            "attempts": self.attempts,
            "attempts_resumed_from_a_checkpoint": self.resumed,
            "attempts_begun_at_step_1_again": self.restarted,
        }
        answers = self.monitor.counts() if hasattr(self, "monitor") else {}
        return summarise(self.seed, self.draws, jobs, answers, self.violations)

    # Steps

    def _prepare(self, volume: Path | None) -> None:
        self.began = time.monotonic()
        self.workload = Workload(self.harness, self.rng)
        self._first_student()
        self.monitor = AvailabilityMonitor(self.harness.url)
        self.context = FaultContext(
            self.harness, self.workload, self.monitor, self.rng, volume=volume
        )
        self.monitor.start()

    def _first_student(self) -> None:
        """Run a chain without faults: a teacher for distillations, and a student to serve."""
        teacher = self.workload.submit("faults-first", self.workload.spec("chain"))
        assert wait_until(lambda: self._settled() == 2, seconds=300, pause=0.5), "no first student"
        self.workload.teacher_model_id = self.harness.store.model(str(teacher)).id
        student = self.harness.store.list_models(kind="distill").items[0]
        body = {"force": True, "reason": "the campaign needs a serving student"}
        answer = httpx.post(
            f"{self.harness.url}/models/{student.id}/promote", json=body, timeout=60
        )
        assert answer.status_code < 300, answer.text
        url, body = f"{self.harness.url}/predict", {"inputs": "it was clean"}
        served = wait_until(
            lambda: httpx.post(url, json=body, timeout=30).status_code == 200, seconds=120
        )
        assert served, "the first student does not serve"

    def _settled(self) -> int:
        for job in self.workload.poll():
            self._check(job)
        return len(self.workload.ended)

    def _draw_all(self, count: int) -> None:
        faults = [
            f for f in self.faults if f.name != "fill_disk" or self.context.volume is not None
        ]
        self._log(f"seed {self.seed}, {count} draws, pid {os.getpid()}")
        deck = draw_schedule(self.rng, 2 * count, faults)
        for number, (fault, phase) in enumerate(deck, start=1):
            if sum(draw.did is not None for draw in self.draws) == count:
                break
            delay = self.rng.choice([0.0, self.rng.uniform(0, 0.05), self.rng.uniform(0, 1.0)])
            draw = Draw(number, fault.name, phase, round(delay, 3))
            self.draws.append(draw)
            self._draw(draw, fault)
            self.write_report()

    def _draw(self, draw: Draw, fault: Fault) -> None:
        is_up = self.harness.wait_until_up(seconds=180)
        if not is_up:
            self._violate(
                "component", f"a component did not recover: {self.harness.platform.pids}", draw
            )
        for thread in self.context.recovery_threads:
            thread.join(200)
        self.context.recovery_threads.clear()
        promotion: threading.Thread | None = None
        for _ in range(MAX_TRIES):
            target = self.context.target = self._await(draw.phase)
            if draw.phase == "promoting":
                promotion = self._promote_meanwhile()
            time.sleep(draw.delay if promotion is None else draw.delay / 4)
            draw.at = round(time.monotonic() - self.began, 1)
            draw.met, draw.job_id = draw.phase, target.job_id if target else ""
            if target is not None and draw.delay:
                draw.met = self._phase_now(target)
            draw.did = fault.inject(self.context)
            if promotion is not None:
                promotion.join(120)
            if draw.did is not None:
                break
        is_aimed = fault.name in ("kill_rank", "kill_torchrun", "flip_byte")
        for job in self.workload.in_flight.values():
            if draw.did is not None and (not is_aimed or job.id == draw.job_id):
                job.draws.append(draw.number)
        for message in self.context.violations:
            self._violate("component", message, draw)
        self.context.violations.clear()
        self._check_for_orphans(draw)
        self._log(
            f"{draw.number:4d} {fault.name:<15} {draw.phase:<10} met {draw.met:<10} {draw.did}"
        )

    def _phase_now(self, target: JobSnapshot) -> str:
        self._settled()
        snapshots = self.workload.snapshots()
        return next((s.phase for s in snapshots if s.job_id == target.job_id), "ended")

    def _await(self, phase: str) -> JobSnapshot | None:
        """Return a job that is in `phase` now, or after PHASE_SECONDS any running job."""
        if phase == "promoting":
            return None
        deadline, looked_at = time.monotonic() + PHASE_SECONDS, 0.0
        while True:
            now = time.monotonic()
            if now - looked_at > 0.3:
                self._settled()
                self.workload.submit_up_to(most=IN_FLIGHT)
                looked_at = time.monotonic()
            snapshots = self.workload.snapshots()
            found = [each for each in snapshots if each.phase == phase]
            if found:
                return self.rng.choice(found)
            if now > deadline:
                running = [each for each in snapshots if each.phase not in ("queued", "waiting")]
                return self.rng.choice(running) if running else None
            time.sleep(0.005)

    def _promote_meanwhile(self) -> threading.Thread:
        """Promote a student in a thread; its row must exist if and only if the response says so."""
        students = self.harness.retry_while_unavailable(
            lambda: self.harness.store.list_models(kind="distill", limit=20).items
        )
        model = self.rng.choice(students)
        reason = f"draw {len(self.draws)}"
        draw = self.draws[-1]

        def promote() -> None:
            body = {"force": True, "reason": reason}
            try:
                answer = httpx.post(
                    f"{self.harness.url}/models/{model.id}/promote", json=body, timeout=60
                )
                status = answer.status_code
            except httpx.TransportError:
                status = 0
            rows = self.harness.execute("SELECT 1 FROM promotions WHERE reason = :r", r=reason)
            possible = {0: (0, 1), 503: (0, 1)}.get(status, (1,))
            if len(rows) not in possible or status not in (0, 200, 201, 503):
                self._violate("promotion", f"answered {status}, {len(rows)} rows", draw)

        thread = threading.Thread(target=promote, daemon=True)
        thread.start()
        return thread

    def _drain(self) -> None:
        """Wait for every job to end; one that does not is lost."""
        self.harness.wait_until_up(seconds=180)
        for thread in self.context.recovery_threads:
            thread.join(200)
        deadline = time.monotonic() + DRAIN_SECONDS
        while self.workload.in_flight and time.monotonic() < deadline:
            self._settled()
            time.sleep(0.5)
        for job in self.workload.in_flight.values():
            row = self.harness.store.job(job.id)
            self._violate("lost", f"{job.id} is still {row.state} ({row.message})", job.draws)
        self._check_for_orphans(None)
        self._check_for_leftovers()
        self.monitor.stop()
        for message in self.monitor.violations():
            self._violate("api", message, None)

    # Checks

    def _check(self, job: TrackedJob) -> None:
        expected = EXPECTED_REASONS
        if hasattr(self, "context") and job.id in self.context.in_flight_on_full_disk:
            expected |= {Reason.DISK_FULL}
        is_flipped = hasattr(self, "context") and job.id in self.context.flipped
        if is_flipped:
            expected |= {Reason.BAD_CHECKPOINT}
        try:
            found = self.harness.retry_while_unavailable(
                lambda: check_job(self.harness.store, job.id, expected=expected)
            )
            row = self.harness.retry_while_unavailable(lambda: self.harness.store.job(job.id))
        except Exception as error:  # noqa: BLE001  (a job that cannot be checked is a violation too)
            self._violate("job", f"{job.id} cannot be checked: {error!r}", job.draws)
            return
        self.ends[f"{row.state}{f' ({row.reason})' if row.reason else ''}"] += 1
        self.attempts += row.attempt
        self.resumed += found.resumed
        self.restarted += found.restarted
        for message in found.violations:
            self._violate("job", f"{job.id}: {message}", job.draws)

    def _check_for_orphans(self, draw: Draw | None) -> None:
        """Report processes whose attempt has ended; a worker has half a minute to stop them."""
        left: list[str] = []

        def none() -> bool:
            processes = self.harness.rank_processes()
            rows = self.harness.execute(
                "SELECT id, attempt FROM jobs WHERE state IN ('running', 'cancelling')"
            )
            live = {(str(i), int(str(n))) for i, n in rows}
            left[:] = [
                f"{each.process.pid} of {each.job_id}/{each.attempt}"
                for each in processes
                if (each.job_id, each.attempt) not in live
            ]
            return not left

        # Processes that are exiting because the attempt has just ended are not orphans.
        if not wait_until(none, seconds=ORPHAN_SECONDS, pause=0.25):
            self._violate("orphan", f"processes outlived their attempt: {left}", draw)

    def _check_for_leftovers(self) -> None:
        """Report artifacts without a row; the sweep has half a minute to remove them."""
        models = self.harness.settings.models_dir

        def unnamed() -> list[str]:
            rows = {str(i) for (i,) in self.harness.execute("SELECT id FROM models")}
            there = [path.name for path in models.iterdir()] if models.is_dir() else []
            return [name for name in there if name not in rows]

        if not wait_until(lambda: not unnamed(), seconds=30, pause=0.5):
            self._violate("leftover", f"artifacts without a row: {unnamed()}", None)

    def _check_for_processes_after_the_end(self) -> None:
        if not hasattr(self.harness, "settings"):
            return
        left = self.harness.rank_processes()
        if left:
            pids = [each.process.pid for each in left]
            self._violate("orphan", f"after the end of the platform: {pids}", None)

    def _violate(self, kind: str, message: str, where: Draw | list[int] | None) -> None:
        numbers = [where.number] if isinstance(where, Draw) else where or []
        self.violations.append({"kind": kind, "message": message, "draws": numbers})
        self._log(f"VIOLATION (seed {self.seed}, draws {numbers}) {kind}: {message}")

    def _log(self, line: str) -> None:
        stamped = f"{time.strftime('%H:%M:%S')} {line}"
        print(stamped, flush=True)
        with (self.out / "campaign.log").open("a") as file:
            file.write(stamped + "\n")

    def write_report(self) -> None:
        """Write the current report, with every draw."""
        document = self.report() | {"each": [asdict(draw) for draw in self.draws]}
        (self.out / "report.json").write_text(json.dumps(document, indent=1))


def main() -> None:
    """Run a campaign; exit code 1 if anything was violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path(".stillhouse/faults"))
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="These faults alone.")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    out = options.out.resolve() / f"{time.strftime('%m%d-%H%M%S')}-seed{seed}"
    campaign = Campaign(out, seed=seed, only=options.only)
    try:
        campaign.run(options.draws)
    finally:
        campaign.write_report()
        print_table(campaign.report())
        print(f"report and logs: {campaign.out}")
    sys.exit(1 if campaign.violations else 0)


if __name__ == "__main__":
    main()
