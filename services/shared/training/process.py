"""A rank's process: joining the process group, agreeing to stop, and reporting a failure.

A failing rank writes `ranks/<k>/failure.json` and torch elastic's own error file, then leaves with a
non-zero exit code; torchrun ends the others, whose secondary errors (closed connections) come later.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from services.shared.jobs.documents import AllocatorDict
from services.shared.jobs.run_directory import (
    Failure,
    RunDirectory,
    RunInput,
    StopRequest,
    WorkerHeartbeat,
    read_record,
    write_json,
)
from services.shared.jobs.state import Reason

# Rank 0 seals an artifact alone while the others wait: hashing 65 GB at 0.5 GB/s takes two minutes.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
STOP_REASONS = ("cancelled", "handed_back", "timed_out")
# Ranks whose worker is silent stop before its lease ends, and so before another worker starts.
SILENT_SHARE = 0.75
WORKER_GRACE_SECONDS = 5.0  # twice the default heartbeat interval
# Freed when a rank runs out of host memory, so that it can still report the failure.
RESERVE_MEMORY_BYTES = 4 * 2**20
RESERVE_DISK_BYTES = 2**18  # a failure with its traceback, in our file and in torch elastic's


class RunFailed(Exception):
    """The run cannot continue, for a reason that the user can act on."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Position:
    """The phase and step of a rank, reported with a failure. Phases are those of the memory plan."""

    phase: str = "load"
    step: int = 0


@dataclass(frozen=True)
class World:
    """This rank's number in the process group, its device and its watch for stop requests."""

    rank: int
    size: int
    device: torch.device
    stopping: StopWatch

    @property
    def is_first_of_node(self) -> bool:
        """Return whether this rank is the one that writes the shared files of its node."""
        return int(os.environ.get("LOCAL_RANK", "0")) == 0

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which writes shared files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum([0.0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, the same on each."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        result: list[float] = tensor.tolist()
        return result


class StopWatch:
    """Detects a stop request and a silent worker (rank 0 polls files) and SIGTERM (any rank)."""

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self._path = run.stop if rank == 0 else None
        self._worker = WorkerWatch(run) if rank == 0 else None
        self._terminated = False

    def listen(self) -> None:
        """Handle SIGTERM as a request to save and exit."""
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self._terminated = True

    def flags(self) -> list[float]:
        """Return one number for each of STOP_REASONS and one for a silent worker, to be summed."""
        reason = "handed_back" if self._terminated else None
        if self._path is not None and self._path.exists():
            request = read_record(self._path, StopRequest)
            reason = request.reason if request is not None else "cancelled"
        is_silent = self._worker is not None and self._worker.is_silent()
        return [*(float(reason == name) for name in STOP_REASONS), float(is_silent)]


class WorkerWatch:
    """Notices that the worker has written no heartbeat for most of its lease.

    After the lease another worker may run the job from this attempt's checkpoints, so these ranks must
    not write any more. Without a heartbeat file, as in tests and benchmarks, no worker is expected.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.heartbeat
        self._count: int | None = None
        self._changed_at = time.monotonic()

    def is_silent(self) -> bool:
        """Return whether the worker has been silent for SILENT_SHARE of its lease."""
        limit = self._silent_limit_seconds()
        if limit is None or time.monotonic() - self._changed_at < limit:
            return False
        # After a long step, or when the machine was suspended, the worker gets time to write.
        deadline = time.monotonic() + WORKER_GRACE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            self._silent_limit_seconds()
            if time.monotonic() - self._changed_at < limit:
                return False
        return True

    def _silent_limit_seconds(self) -> float | None:
        heartbeat = read_record(self._path, WorkerHeartbeat)
        if heartbeat is None:
            return None
        if heartbeat.count != self._count:
            self._count, self._changed_at = heartbeat.count, time.monotonic()
        return SILENT_SHARE * heartbeat.lease_seconds


def agreed_stop(flags: Sequence[float]) -> str | None:
    """Return the stop reason that any rank has flagged, or None; `flags` are summed over the ranks.

    Raises RunFailed(LOST) on every rank where the worker has gone silent: nothing more may be saved.
    """
    *votes, silent = flags
    if silent:
        raise RunFailed(
            Reason.LOST,
            "The worker of this run has gone silent; another worker may have taken the job, so these "
            "ranks stop without saving.",
        )
    return next((name for name, vote in zip(STOP_REASONS, votes, strict=True) if vote), None)


@contextmanager
def fail_with(reason: Reason) -> Iterator[None]:
    """Convert ValueError and OSError from reading user input into RunFailed with `reason`."""
    try:
        yield
    except (ValueError, OSError) as error:
        if (
            reason_of(error) is not Reason.CRASHED
        ):  # a full disk or exhausted memory is not caused by the input
            raise
        raise RunFailed(reason, str(error)) from error


def read_run_input(run: RunDirectory) -> RunInput:
    """Return the input of the run as the worker wrote it. Raises RunFailed(BAD_SPEC)."""
    try:
        return RunInput.model_validate_json(run.spec.read_bytes())
    except (OSError, ValidationError) as error:
        raise RunFailed(Reason.BAD_SPEC, f"{run.spec} cannot be read: {error}") from error


def join(run: RunDirectory, *, device: str, seed: int) -> World:
    """Join the process group that torchrun describes in the environment.

    `device` is the requested kind; "cpu" keeps the rank off any accelerator.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    use_accelerator = device != "cpu" and torch.cuda.is_available()
    if device != "cpu" and not use_accelerator:
        raise RunFailed(
            Reason.BAD_SPEC,
            f"resources.device is {device!r}, but torch {torch.__version__} sees no accelerator here; "
            'check the driver and the torch build (`stillhouse doctor`), or request "cpu"',
        )
    make_deterministic(seed)
    if use_accelerator:
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
        # gloo as well: with `offload = "all"` parameters and their collectives are on the host.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=COLLECTIVE_TIMEOUT)
    else:
        place = torch.device("cpu")
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    stopping = StopWatch(run, rank)
    stopping.listen()
    return World(rank=rank, size=size, device=place, stopping=stopping)


def leave() -> NoReturn:
    """Destroy the process group and exit with code 0."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: torch's native threads occasionally abort the interpreter's shutdown ("terminate
    # called without an active exception", torch 2.13 with gloo, one run in ten), and torchrun would
    # take that for a failed job. Everything is on disk already.
    os._exit(0)


def make_deterministic(seed: int) -> None:
    """Make torch deterministic, as far as its kernels allow."""
    # cuBLAS and hipBLAS read it when the first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(seed)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch for one step of one rank, so that dropout needs no state to resume from."""
    # Odd multipliers give neighbouring (step, rank) pairs different seeds; the seed is mixed by the generator.
    torch.manual_seed((seed * 1_000_003 + step * 8_191 + rank) % 2**63)


class _EmergencyReserve:
    """Host memory and disk space held back, so that a rank out of either can still report its failure."""

    def __init__(self, directory: Path) -> None:
        self._memory = bytearray(RESERVE_MEMORY_BYTES)
        self._file: IO[bytes] | None = None
        with suppress(OSError):  # already full: the next write reports it
            # Anonymous: the kernel frees it when this process ends in any way.
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
            self._file.write(bytes(RESERVE_DISK_BYTES))

    def release(self) -> None:
        self._memory = bytearray()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


@contextmanager
def report_failures(run: RunDirectory, position: Position) -> Iterator[None]:
    """Write the failure of this rank, then re-raise it; the boundary of a rank's process."""
    rank = int(os.environ.get("RANK", "0"))
    handler = ErrorHandler()
    handler.initialize()
    reserve = _EmergencyReserve(run.path)
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        reserve.release()
        try:
            write_json(
                run.failure_file(rank), describe_failure(error, rank=rank, position=position)
            )
        finally:
            handler.record_exception(error)
        raise
    reserve.release()


def describe_failure(error: BaseException, *, rank: int, position: Position) -> Failure:
    """Return the failure record of an error on this rank."""
    message = str(error) or type(error).__name__
    return Failure(
        time=time.time(),
        rank=rank,
        phase=position.phase,
        step=position.step,
        reason=reason_of(error),
        message=message[:20_000],
        error_type=f"{type(error).__module__}.{type(error).__qualname__}",
        traceback="".join(traceback.format_exception(error))[-40_000:],
        request_bytes=_request_bytes(message),
        allocator=allocator_state(),
    )


# Messages of torch's CPU allocator and the C++ library when malloc or mmap fails (c10/core/impl/
# alloc_cpu.cpp; std::bad_alloc's what()).
_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator|std::bad_alloc|Cannot allocate memory|can't allocate memory"
)
# torch < 2.5 and some vendor builds raise plain RuntimeError; NPU, XPU and MLU builds name themselves.
_DEVICE_MEMORY = re.compile(
    r"(CUDA|HIP|NPU|XPU|MLU|MPS|GCU) (error: )?out of memory", re.IGNORECASE
)
# What gloo and NCCL raise on a rank that waits for a failed one: a timeout, or a connection that the
# other end closed.
_COLLECTIVE = re.compile(
    r"timed out waiting|collective operation timeout|watchdog.*timeout|Timeout\(ms\)=|"
    r"gloo.*(connection (closed|reset) by peer|broken pipe)|ncclRemoteError",
    re.IGNORECASE,
)


def reason_of(error: BaseException) -> Reason:
    """Return the stable reason of an error."""
    message = str(error)
    if isinstance(error, RunFailed):
        return error.reason
    if isinstance(error, torch.OutOfMemoryError) or _DEVICE_MEMORY.search(message):
        return Reason.DEVICE_OUT_OF_MEMORY
    if isinstance(error, MemoryError) or _HOST_MEMORY.search(message):
        return Reason.HOST_OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Reason.DISK_FULL
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return Reason.HOST_OUT_OF_MEMORY
    if _COLLECTIVE.search(message):
        return Reason.COLLECTIVE_TIMEOUT
    return Reason.CRASHED


_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_REQUEST = re.compile(
    r"tried to allocate (?P<number>\d+(\.\d+)?) (?P<unit>bytes|B|KiB|MiB|GiB|TiB)", re.IGNORECASE
)


def _request_bytes(message: str) -> int | None:
    found = _REQUEST.search(message)
    if found is None:
        return None
    unit = next(u for u in _UNITS if u.lower() == found["unit"].lower())
    return round(float(found["number"]) * _UNITS[unit])


def allocator_state() -> AllocatorDict | None:
    """Return the accelerator allocator's counters in bytes; without one, those of this process.

    None where they can no longer be read; the original failure must still be reported.
    """
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return _device_memory()
        return _process_memory()
    except (RuntimeError, OSError, ValueError):
        return None


def _device_memory() -> AllocatorDict:
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    return {
        "basis": "allocator",
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "inactive_split_bytes": stats.get("inactive_split_bytes.all.current", 0),
        "num_alloc_retries": stats.get("num_alloc_retries", 0),
        "num_ooms": stats.get("num_ooms", 0),
        "device_free_bytes": free,
        "device_total_bytes": total,
    }


def _process_memory() -> AllocatorDict:
    """Return the kernel's counters of this process; torch's CPU allocator has none."""
    with Path("/proc/self/status").open(encoding="ascii", errors="replace") as lines:
        status = dict(line.split(":", 1) for line in lines if line.endswith(" kB\n"))
    sizes = {name: int(value.split()[0]) * 1024 for name, value in status.items()}
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return {
        "basis": "process",
        "resident_bytes": sizes.get("VmRSS"),
        "peak_resident_bytes": sizes.get("VmHWM"),
        "address_space_bytes": sizes.get("VmSize"),
        "address_space_limit_bytes": None if limit == resource.RLIM_INFINITY else limit,
    }
