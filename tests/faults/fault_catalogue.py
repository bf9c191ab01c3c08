"""The faults, and the phases of a job in which each is injected.

Simulated faults: a network failure is a proxy that resets (or holds) the workers' connections; a clock
jump of the database is a lease moved into the past; a full disk is a file that fills the small tmpfs
that holds runs and models. Everything else is real: signals, FLUSHALL, messages sent again.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import redis

from services.shared.jobs.queue import send
from tests.faults.availability import AvailabilityMonitor, Outage
from tests.faults.degradations import (
    exhaust_descriptors,
    flip_byte,
    read_only_database,
    stop_and_continue_worker,
)
from tests.faults.harness import LEASE_SECONDS, WORKERS, PlatformHarness, RankProcess
from tests.faults.waiting import wait_until
from tests.faults.workload import JobSnapshot, TrackedJob, Workload, processes_of

RUNNING = ("claimed", "loading", "training", "saving", "exporting", "finishing")
EVERY = ("queued", *RUNNING)


@dataclass
class FaultContext:
    """Everything that a fault may affect, and the job that it targets."""

    harness: PlatformHarness
    workload: Workload
    monitor: AvailabilityMonitor
    rng: random.Random
    target: JobSnapshot | None = None
    has_student: bool = True  # whether /predict returns 200 on a healthy platform
    volume: Path | None = None  # the small file system; None where it cannot be mounted
    recovery_threads: list[threading.Thread] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    flipped: set[str] = field(default_factory=set)  # jobs with a flipped bit in a checkpoint
    in_flight_on_full_disk: set[str] = field(
        default_factory=set
    )  # jobs in flight while the disk was full


@dataclass(frozen=True)
class Fault:
    """A fault: `inject` returns what it did, or None where there was no target."""

    name: str
    inject: Callable[[FaultContext], str | None]
    phases: tuple[str, ...] = EVERY
    weight: int = 1


def kill_rank(context: FaultContext) -> str | None:
    return _kill_process(context, lambda each: not each.is_torchrun, "rank")


def kill_torchrun(context: FaultContext) -> str | None:
    return _kill_process(context, lambda each: each.is_torchrun, "torchrun")


def kill_worker(context: FaultContext) -> str | None:
    return _end_worker(context, signal.SIGKILL)


def end_worker(context: FaultContext) -> str | None:
    return _end_worker(context, signal.SIGTERM)


def kill_api(context: FaultContext) -> str | None:
    outage = context.monitor.begin_outage("api")
    pid = context.harness.signal_component("api")
    if pid is None:
        outage.end = outage.start
        return None
    is_healthy = _predicts if context.has_student else _reads
    _end_outage_on_recovery(
        context, outage, lambda: is_healthy(context.harness.url), "the API did not recover"
    )
    return f"killed the API ({pid})"


def kill_postgres(context: FaultContext) -> str | None:
    outage = context.monitor.begin_outage("postgres")
    pid = context.harness.signal_component("postgres")
    if pid is None:
        outage.end = outage.start
        return None
    _end_outage_on_recovery(
        context, outage, lambda: _reads(context.harness.url), "Postgres did not recover"
    )
    return f"killed Postgres ({pid})"


def kill_valkey(context: FaultContext) -> str | None:
    pid = context.harness.signal_component("valkey")
    return None if pid is None else f"killed Valkey ({pid})"


def flush_broker(context: FaultContext) -> str | None:
    socket = context.harness.settings.broker_url.removeprefix("redis+socket://")
    try:
        with redis.Redis(unix_socket_path=socket) as client:
            lost = client.dbsize()
            client.flushall()
    except redis.RedisError:
        return None
    return f"flushed {lost} keys"


def cut_network(context: FaultContext) -> str | None:
    seconds = context.rng.uniform(0.5, 1.4 * LEASE_SECONDS)
    context.harness.proxy.cut()
    time.sleep(seconds)
    context.harness.proxy.heal()
    return f"no network for {seconds:.1f} s"


def freeze_network(context: FaultContext) -> str | None:
    seconds = context.rng.uniform(0.5, 1.4 * LEASE_SECONDS)
    context.harness.proxy.freeze()
    time.sleep(seconds)
    context.harness.proxy.heal()
    return f"a frozen network for {seconds:.1f} s"


def lose_commit_reply(context: FaultContext) -> str | None:
    """Drop the reply to a claim (queued), a result (finishing), or else any commit of a worker."""
    phase = context.target.phase if context.target else ""
    statement = {"queued": b"INSERT INTO attempts", "finishing": b"UPDATE attempts"}.get(phase, b"")
    proxy, before = context.harness.proxy, context.harness.proxy.lost_replies
    proxy.lose_commit_reply(statement)
    found = wait_until(lambda: proxy.lost_replies > before, seconds=6, pause=0.02)
    proxy.statement_to_lose = None
    return f"lost the reply to a COMMIT ({statement.decode() or 'any'})" if found else None


def jump_clock(context: FaultContext) -> str | None:
    moved = context.harness.execute(
        "UPDATE jobs SET lease_until = lease_until - interval '1 hour' "
        "WHERE state IN ('running', 'cancelling') RETURNING id"
    )
    return f"{len(moved)} leases ran out at once" if moved else None


def deliver_twice(context: FaultContext) -> str | None:
    ended = context.workload.ended[-3:]
    jobs: list[TrackedJob] = [*context.workload.in_flight.values(), *ended]
    sent = 0
    for job in jobs:
        for _ in range(3):
            sent += send(
                context.harness.celery, job.id, "teacher" if job.kind == "teacher" else "distill"
            )
    return f"sent {sent} messages again" if sent else None


def fill_disk(context: FaultContext) -> str | None:
    """Fill the file system of runs and models for a few seconds."""
    assert context.volume is not None
    context.in_flight_on_full_disk |= set(context.workload.in_flight)
    filler = context.volume / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                write_until_full(file.fileno(), size)
            time.sleep(context.rng.uniform(1, 6))
    finally:
        filler.unlink(missing_ok=True)
    return "filled the disk"


FAULTS = [
    Fault("kill_rank", kill_rank, RUNNING, weight=3),
    Fault("kill_torchrun", kill_torchrun, RUNNING, weight=2),
    Fault("kill_worker", kill_worker, (*EVERY, "promoting"), weight=3),
    Fault("kill_api", kill_api, (*EVERY, "promoting")),
    Fault("kill_postgres", kill_postgres, (*EVERY, "promoting"), weight=2),
    Fault("kill_valkey", kill_valkey, (*EVERY, "promoting")),
    Fault("end_worker", end_worker, EVERY),
    Fault("flush_broker", flush_broker, ("queued", "claimed", "training")),
    Fault("cut_network", cut_network, EVERY),
    Fault("freeze_network", freeze_network, ("claimed", "training", "finishing")),
    Fault("lose_commit_reply", lose_commit_reply, EVERY),
    Fault("jump_clock", jump_clock, RUNNING),
    Fault("deliver_twice", deliver_twice, EVERY),
    Fault("fill_disk", fill_disk, ("training", "exporting")),
    Fault("read_only", read_only_database, (*EVERY, "promoting")),
    Fault("descriptors", exhaust_descriptors, EVERY),
    Fault("flip_byte", flip_byte, ("training", "saving"), weight=2),
    Fault("stop_worker", stop_and_continue_worker, RUNNING, weight=2),
]


def draw_schedule(rng: random.Random, count: int, faults: list[Fault]) -> list[tuple[Fault, str]]:
    """Return `count` (fault, phase) pairs: all pairs by weight, shuffled, repeated as often as needed."""
    schedule: list[tuple[Fault, str]] = []
    while len(schedule) < count:
        pairs = [(fault, phase) for fault in faults for phase in fault.phases * fault.weight]
        rng.shuffle(pairs)
        schedule += pairs
    return schedule[:count]


def _kill_process(
    context: FaultContext, wanted: Callable[[RankProcess], bool], what: str
) -> str | None:
    target = context.target
    if target is None:
        return None
    found: list[RankProcess] = []

    def look() -> bool:
        found[:] = [p for p in processes_of(context.harness.rank_processes(), target) if wanted(p)]
        return bool(found)

    # Between the claim and the first line of progress, torchrun and ranks take seconds to appear.
    if not wait_until(look, seconds=10 if target.phase == "claimed" else 0, pause=0.05):
        return None
    process = context.rng.choice(found)
    try:
        process.process.kill()
    except psutil.NoSuchProcess:
        return None
    return f"killed {what} {process.process.pid} of {target.job_id}/{target.attempt}"


def _end_worker(context: FaultContext, number: signal.Signals) -> str | None:
    """Signal the worker that runs the target, or the worker of its queue while it waits."""
    name = context.rng.choice(WORKERS)
    if context.target is not None:
        rows = context.harness.execute(
            "SELECT worker FROM jobs WHERE id = :id", id=context.target.job_id
        )
        holder = str(rows[0][0] or "") if rows else ""
        pids = {str(pid): part for part, pid in context.harness.platform.pids.items()}
        by_kind = "distiller" if context.target.kind == "distill" else "trainer"
        name = pids.get(holder.rpartition(":")[2], by_kind)
    pid = context.harness.signal_component(name, number)
    return None if pid is None else f"{number.name} to {name} ({pid})"


def _end_outage_on_recovery(
    context: FaultContext, outage: Outage, is_healthy: Callable[[], bool], message: str
) -> None:
    """End an outage once the component responds again, in a thread of its own."""

    def wait() -> None:
        time.sleep(0.5)  # the signal needs time to take effect
        if not wait_until(is_healthy, seconds=180, pause=0.1):
            context.violations.append(message)
        outage.end = time.monotonic()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    context.recovery_threads.append(thread)


def _predicts(url: str) -> bool:
    try:
        answer = httpx.post(f"{url}/predict", json={"inputs": "it was clean"}, timeout=10)
    except httpx.TransportError:
        return False
    return answer.status_code == 200


def _reads(url: str) -> bool:
    try:
        return httpx.get(f"{url}/jobs", params={"limit": 1}, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def write_until_full(descriptor: int, size: int) -> None:
    """Append blocks of `size` bytes until the file system takes no more."""
    block = bytes(size)
    try:
        while True:
            os.write(descriptor, block)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
