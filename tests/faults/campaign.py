"""Random faults against one long-lived platform, and what was left of every job afterwards.

    python -m tests.faults.campaign --draws 300 --seed 7 --out .stillhouse/faults

The seed fixes faults, phases and delays; when a phase comes up depends on the machine.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from services.shared.jobs.state import Reason
from tests.faults.catalogue import FAULTS, Fault, Scene, draw_deck
from tests.faults.house import House, mount_volume
from tests.faults.invariants import ENDS, check_job
from tests.faults.proxy import until
from tests.faults.report import Draw, print_table, summarise
from tests.faults.watch import Watch
from tests.faults.workload import Standing, Tracked, Workload

IN_FLIGHT = 6
PHASE_SECONDS = 20  # how long a draw waits for a job in its phase
ORPHAN_SECONDS = 30  # how long a process may outlive its attempt: a cut worker has to hear of it
DRAIN_SECONDS = 900
MOST_TRIES = 2  # a job may leave its phase before it is hit


class Campaign:
    """The platform, its jobs, the draws, and the violations found."""

    def __init__(self, out: Path, *, seed: int) -> None:
        self.out = out
        self.rng = random.Random(seed)
        self.seed = seed
        self.violations: list[dict[str, Any]] = []
        self.draws: list[Draw] = []
        self.ends: Counter[str] = Counter()
        self.resumed = self.restarted = self.attempts = 0

    def run(self, count: int) -> None:
        """Start the platform, promote a student, let `count` faults hit, drain, check everything."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.house = House(self.out)
        volume = mount_volume(self.out / "data")
        try:
            self.house.start()
            self._prepare(volume)
            self._draw_all(count)
            self._drain()
        finally:
            if hasattr(self, "workload"):
                self.workload.close()
            self.house.stop()
            self._look_for_processes_after_the_end()
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
        answers = self.watch.counts() if hasattr(self, "watch") else {}
        return summarise(self.seed, self.draws, jobs, answers, self.violations)

    # The steps of a campaign

    def _prepare(self, volume: Path | None) -> None:
        self.began = time.monotonic()
        self.workload = Workload(self.house, self.rng)
        self._first_student()
        self.watch = Watch(self.house.url)
        self.scene = Scene(self.house, self.workload, self.watch, self.rng, volume=volume)
        self.watch.start()

    def _first_student(self) -> None:
        """Run a chain in peace: a teacher for distillations, and a student that serves."""
        teacher = self.workload.submit("faults-first", self.workload.spec("chain"))
        assert until(lambda: self._settled() == 2, seconds=300, pause=0.5), "no first student"
        self.workload.teacher_model_id = self.house.store.model(str(teacher)).id
        student = self.house.store.list_models(kind="distill").items[0]
        body = {"force": True, "reason": "the campaign needs a student that serves"}
        answer = httpx.post(f"{self.house.url}/models/{student.id}/promote", json=body, timeout=60)
        assert answer.status_code < 300, answer.text
        url, body = f"{self.house.url}/predict", {"inputs": "it was clean"}
        served = until(
            lambda: httpx.post(url, json=body, timeout=30).status_code == 200, seconds=120
        )
        assert served, "the first student does not serve"

    def _settled(self) -> int:
        for job in self.workload.look():
            self._judge(job)
        return len(self.workload.ended)

    def _draw_all(self, count: int) -> None:
        faults = [f for f in FAULTS if f.name != "fill_disk" or self.scene.volume is not None]
        self._say(f"seed {self.seed}, {count} draws, pid {os.getpid()}")
        deck = draw_deck(self.rng, 2 * count, faults)
        for number, (fault, phase) in enumerate(deck, start=1):
            if sum(draw.did is not None for draw in self.draws) == count:
                break
            delay = self.rng.choice([0.0, self.rng.uniform(0, 0.05), self.rng.uniform(0, 1.0)])
            draw = Draw(number, fault.name, phase, round(delay, 3))
            self.draws.append(draw)
            self._draw(draw, fault)
            self.write_report()

    def _draw(self, draw: Draw, fault: Fault) -> None:
        is_up = self.house.wait_until_up(seconds=180)
        if not is_up:
            self._violate("part", f"a part did not come back: {self.house.platform.pids}", draw)
        for closer in self.scene.closers:
            closer.join(200)
        self.scene.closers.clear()
        promotion: threading.Thread | None = None
        for _ in range(MOST_TRIES):
            target = self.scene.target = self._await(draw.phase)
            if draw.phase == "promoting":
                promotion = self._promote_meanwhile()
            time.sleep(draw.delay if promotion is None else draw.delay / 4)
            draw.at = round(time.monotonic() - self.began, 1)
            draw.met, draw.job_id = draw.phase, target.job_id if target else ""
            if target is not None and draw.delay:
                draw.met = self._phase_now(target)
            draw.did = fault.strike(self.scene)
            if promotion is not None:
                promotion.join(120)
            if draw.did is not None:
                break
        is_aimed = fault.name in ("kill_rank", "kill_torchrun")
        for job in self.workload.flying.values():
            if draw.did is not None and (not is_aimed or job.id == draw.job_id):
                job.draws.append(draw.number)
        for message in self.scene.violations:
            self._violate("part", message, draw)
        self.scene.violations.clear()
        self._look_for_orphans(draw)
        self._say(
            f"{draw.number:4d} {fault.name:<15} {draw.phase:<10} met {draw.met:<10} {draw.did}"
        )

    def _phase_now(self, target: Standing) -> str:
        self._settled()
        standings = self.workload.standings()
        return next((s.phase for s in standings if s.job_id == target.job_id), "ended")

    def _await(self, phase: str) -> Standing | None:
        """Return a job that is in `phase` now, or after a while any that runs."""
        if phase == "promoting":
            return None
        deadline, looked_at = time.monotonic() + PHASE_SECONDS, 0.0
        while True:
            now = time.monotonic()
            if now - looked_at > 0.3:
                self._settled()
                self.workload.top_up(most=IN_FLIGHT)
                looked_at = time.monotonic()
            standings = self.workload.standings()
            found = [each for each in standings if each.phase == phase]
            if found:
                return self.rng.choice(found)
            if now > deadline:
                running = [each for each in standings if each.phase not in ("queued", "waiting")]
                return self.rng.choice(running) if running else None
            time.sleep(0.005)

    def _promote_meanwhile(self) -> threading.Thread:
        """Promote some student in a thread; its row must be there if and only if the answer says so."""
        students = self.house.patiently(
            lambda: self.house.store.list_models(kind="distill", limit=20).items
        )
        model = self.rng.choice(students)
        reason = f"draw {len(self.draws)}"
        draw = self.draws[-1]

        def promote() -> None:
            body = {"force": True, "reason": reason}
            try:
                answer = httpx.post(
                    f"{self.house.url}/models/{model.id}/promote", json=body, timeout=60
                )
                status = answer.status_code
            except httpx.TransportError:
                status = 0
            rows = self.house.execute("SELECT 1 FROM promotions WHERE reason = :r", r=reason)
            possible = {0: (0, 1), 503: (0, 1)}.get(status, (1,))
            if len(rows) not in possible or status not in (0, 200, 201, 503):
                self._violate("promotion", f"answered {status}, {len(rows)} rows", draw)

        thread = threading.Thread(target=promote, daemon=True)
        thread.start()
        return thread

    def _drain(self) -> None:
        """Let every job end; what does not is lost."""
        self.house.wait_until_up(seconds=180)
        for closer in self.scene.closers:
            closer.join(200)
        deadline = time.monotonic() + DRAIN_SECONDS
        while self.workload.flying and time.monotonic() < deadline:
            self._settled()
            time.sleep(0.5)
        for job in self.workload.flying.values():
            row = self.house.store.job(job.id)
            self._violate("lost", f"{job.id} is still {row.state} ({row.message})", job.draws)
        self._look_for_orphans(None)
        self._look_for_leftovers()
        self.watch.stop()
        for message in self.watch.violations():
            self._violate("api", message, None)

    # What is looked at

    def _judge(self, job: Tracked) -> None:
        ends = ENDS
        if hasattr(self, "scene") and job.id in self.scene.might_fill:
            ends |= {Reason.DISK_FULL}
        try:
            found = self.house.patiently(lambda: check_job(self.house.store, job.id, ends=ends))
            row = self.house.patiently(lambda: self.house.store.job(job.id))
        except Exception as error:  # noqa: BLE001  (what cannot be checked is a violation, too)
            self._violate("job", f"{job.id} cannot be checked: {error!r}", job.draws)
            return
        self.ends[f"{row.state}{f' ({row.reason})' if row.reason else ''}"] += 1
        self.attempts += row.attempt
        self.resumed += found.resumed
        self.restarted += found.restarted
        for message in found.violations:
            self._violate("job", f"{job.id}: {message}", job.draws)

    def _look_for_orphans(self, draw: Draw | None) -> None:
        """Find processes whose attempt is over; a worker has half a minute to end them."""
        left: list[str] = []

        def none() -> bool:
            processes = self.house.rank_processes()
            rows = self.house.execute(
                "SELECT id, attempt FROM jobs WHERE state IN ('running', 'cancelling')"
            )
            live = {(str(i), int(str(n))) for i, n in rows}
            left[:] = [
                f"{each.process.pid} of {each.job_id}/{each.attempt}"
                for each in processes
                if (each.job_id, each.attempt) not in live
            ]
            return not left

        # Processes that are on their way out while the attempt has just ended are none.
        if not until(none, seconds=ORPHAN_SECONDS, pause=0.25):
            self._violate("orphan", f"processes outlived their attempt: {left}", draw)

    def _look_for_leftovers(self) -> None:
        """Find artifacts that no row names; the sweep has half a minute to remove them."""
        models = self.house.settings.models_dir

        def unnamed() -> list[str]:
            rows = {str(i) for (i,) in self.house.execute("SELECT id FROM models")}
            there = [path.name for path in models.iterdir()] if models.is_dir() else []
            return [name for name in there if name not in rows]

        if not until(lambda: not unnamed(), seconds=30, pause=0.5):
            self._violate("leftover", f"artifacts without a row: {unnamed()}", None)

    def _look_for_processes_after_the_end(self) -> None:
        if not hasattr(self.house, "settings"):
            return
        left = self.house.rank_processes()
        if left:
            pids = [each.process.pid for each in left]
            self._violate("orphan", f"after the end of the platform: {pids}", None)

    def _violate(self, kind: str, message: str, where: Draw | list[int] | None) -> None:
        numbers = [where.number] if isinstance(where, Draw) else where or []
        self.violations.append({"kind": kind, "message": message, "draws": numbers})
        self._say(f"VIOLATION (seed {self.seed}, draws {numbers}) {kind}: {message}")

    def _say(self, line: str) -> None:
        stamped = f"{time.strftime('%H:%M:%S')} {line}"
        print(stamped, flush=True)
        with (self.out / "campaign.log").open("a") as file:
            file.write(stamped + "\n")

    def write_report(self) -> None:
        """Write the report as it stands, with every draw."""
        whole = self.report() | {"each": [asdict(draw) for draw in self.draws]}
        (self.out / "report.json").write_text(json.dumps(whole, indent=1))


def main() -> None:
    """Run a campaign; exit code 1 if anything was violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path(".stillhouse/faults"))
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    campaign = Campaign(
        options.out.resolve() / f"{time.strftime('%m%d-%H%M%S')}-seed{seed}", seed=seed
    )
    try:
        campaign.run(options.draws)
    finally:
        campaign.write_report()
        print_table(campaign.report())
        print(f"report and logs: {campaign.out}")
    sys.exit(1 if campaign.violations else 0)


if __name__ == "__main__":
    main()
