"""The faults, and the phases of a job at which each is tried.

Simulated, and how: a cut network is a proxy that resets (or holds) the workers' connections; a jump of
the database's clock is a lease moved into the past; a full disk is a file that fills the small tmpfs
on which runs and models lie. Everything else is real: signals, FLUSHALL, messages sent again.
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
from tests.faults.house import LEASE_SECONDS, WORKERS, House, RankProcess
from tests.faults.proxy import until
from tests.faults.watch import Watch
from tests.faults.workload import Standing, Tracked, Workload, victims

RUNNING = ("claimed", "loading", "training", "saving", "exporting", "finishing")
EVERY = ("queued", *RUNNING)


@dataclass
class Scene:
    """Everything that a fault may touch, and the job that it is aimed at."""

    house: House
    workload: Workload
    watch: Watch
    rng: random.Random
    target: Standing | None = None
    has_student: bool = True  # whether /predict answers 200 when all is well
    volume: Path | None = None  # the small file system; None where none can be mounted
    closers: list[threading.Thread] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    might_fill: set[str] = field(default_factory=set)  # jobs in flight while the disk was full


@dataclass(frozen=True)
class Fault:
    """A fault: `strike` returns what it did, or None where it found nothing to hit."""

    name: str
    strike: Callable[[Scene], str | None]
    phases: tuple[str, ...] = EVERY
    weight: int = 1


def kill_rank(scene: Scene) -> str | None:
    return _kill_process(scene, lambda each: not each.is_torchrun, "rank")


def kill_torchrun(scene: Scene) -> str | None:
    return _kill_process(scene, lambda each: each.is_torchrun, "torchrun")


def kill_worker(scene: Scene) -> str | None:
    return _end_worker(scene, signal.SIGKILL)


def end_worker(scene: Scene) -> str | None:
    return _end_worker(scene, signal.SIGTERM)


def kill_api(scene: Scene) -> str | None:
    window = scene.watch.begin("api")
    pid = scene.house.signal_part("api")
    if pid is None:
        window[1] = window[0]
        return None
    answers = _predicts if scene.has_student else _reads
    _close_later(scene, window, lambda: answers(scene.house.url), "the API did not come back")
    return f"killed the API ({pid})"


def kill_postgres(scene: Scene) -> str | None:
    window = scene.watch.begin("postgres")
    pid = scene.house.signal_part("postgres")
    if pid is None:
        window[1] = window[0]
        return None
    _close_later(scene, window, lambda: _reads(scene.house.url), "Postgres did not come back")
    return f"killed Postgres ({pid})"


def kill_valkey(scene: Scene) -> str | None:
    pid = scene.house.signal_part("valkey")
    return None if pid is None else f"killed Valkey ({pid})"


def flush_broker(scene: Scene) -> str | None:
    socket = scene.house.settings.broker_url.removeprefix("redis+socket://")
    try:
        with redis.Redis(unix_socket_path=socket) as client:
            lost = client.dbsize()
            client.flushall()
    except redis.RedisError:
        return None
    return f"flushed {lost} keys"


def cut_network(scene: Scene) -> str | None:
    seconds = scene.rng.uniform(0.5, 1.4 * LEASE_SECONDS)
    scene.house.proxy.cut()
    time.sleep(seconds)
    scene.house.proxy.heal()
    return f"no network for {seconds:.1f} s"


def freeze_network(scene: Scene) -> str | None:
    seconds = scene.rng.uniform(0.5, 1.4 * LEASE_SECONDS)
    scene.house.proxy.freeze()
    time.sleep(seconds)
    scene.house.proxy.heal()
    return f"a frozen network for {seconds:.1f} s"


def lose_answer(scene: Scene) -> str | None:
    """Lose the answer to a claim (queued), a result (finishing), or else any commit of a worker."""
    phase = scene.target.phase if scene.target else ""
    needle = {"queued": b"INSERT INTO attempts", "finishing": b"UPDATE attempts"}.get(phase, b"")
    proxy, before = scene.house.proxy, scene.house.proxy.lost_answers
    proxy.lose_answer(needle)
    found = until(lambda: proxy.lost_answers > before, seconds=6, pause=0.02)
    proxy.needle = None
    return f"lost the answer to a COMMIT ({needle.decode() or 'any'})" if found else None


def jump_clock(scene: Scene) -> str | None:
    moved = scene.house.execute(
        "UPDATE jobs SET lease_until = lease_until - interval '1 hour' "
        "WHERE state IN ('running', 'cancelling') RETURNING id"
    )
    return f"{len(moved)} leases ran out at once" if moved else None


def deliver_twice(scene: Scene) -> str | None:
    ended = scene.workload.ended[-3:]
    jobs: list[Tracked] = [*scene.workload.flying.values(), *ended]
    sent = 0
    for job in jobs:
        for _ in range(3):
            sent += send(
                scene.house.celery, job.id, "teacher" if job.kind == "teacher" else "distill"
            )
    return f"sent {sent} messages again" if sent else None


def fill_disk(scene: Scene) -> str | None:
    """Fill the file system of runs and models for a few seconds."""
    assert scene.volume is not None
    scene.might_fill |= set(scene.workload.flying)
    filler = scene.volume / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                write_until_full(file.fileno(), size)
            time.sleep(scene.rng.uniform(1, 6))
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
    Fault("lose_answer", lose_answer, EVERY),
    Fault("jump_clock", jump_clock, RUNNING),
    Fault("deliver_twice", deliver_twice, EVERY),
    Fault("fill_disk", fill_disk, ("training", "exporting")),
]


def draw_deck(rng: random.Random, count: int, faults: list[Fault]) -> list[tuple[Fault, str]]:
    """Return `count` (fault, phase) pairs: every pair by its weight, shuffled, over and over."""
    deck: list[tuple[Fault, str]] = []
    while len(deck) < count:
        cards = [(fault, phase) for fault in faults for phase in fault.phases * fault.weight]
        rng.shuffle(cards)
        deck += cards
    return deck[:count]


def _kill_process(scene: Scene, wanted: Callable[[RankProcess], bool], what: str) -> str | None:
    target = scene.target
    if target is None:
        return None
    found: list[RankProcess] = []

    def look() -> bool:
        found[:] = [p for p in victims(scene.house.rank_processes(), target) if wanted(p)]
        return bool(found)

    # Between the claim and the first line of progress, torchrun and ranks take seconds to appear.
    if not until(look, seconds=10 if target.phase == "claimed" else 0, pause=0.05):
        return None
    victim = scene.rng.choice(found)
    try:
        victim.process.kill()
    except psutil.NoSuchProcess:
        return None
    return f"killed {what} {victim.process.pid} of {target.job_id}/{target.attempt}"


def _end_worker(scene: Scene, number: signal.Signals) -> str | None:
    """Signal the worker that has the target, or the worker of its queue while it waits."""
    name = scene.rng.choice(WORKERS)
    if scene.target is not None:
        rows = scene.house.execute("SELECT worker FROM jobs WHERE id = :id", id=scene.target.job_id)
        holder = str(rows[0][0] or "") if rows else ""
        pids = {str(pid): part for part, pid in scene.house.platform.pids.items()}
        by_kind = "distiller" if scene.target.kind == "distill" else "trainer"
        name = pids.get(holder.rpartition(":")[2], by_kind)
    pid = scene.house.signal_part(name, number)
    return None if pid is None else f"{number.name} to {name} ({pid})"


def _close_later(
    scene: Scene, window: list[float], healed: Callable[[], bool], otherwise: str
) -> None:
    """End a window once the part answers again, in a thread of its own."""

    def wait() -> None:
        time.sleep(0.5)  # the dead must not be asked before it is dead
        if not until(healed, seconds=180, pause=0.1):
            scene.violations.append(otherwise)
        window[1] = time.monotonic()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    scene.closers.append(thread)


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
