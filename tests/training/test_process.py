"""A failing rank reports its reason, whatever went wrong."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from services.shared.jobs.run_directory import (
    Failure,
    RunDirectory,
    StopRequest,
    WorkerHeartbeat,
    read_record,
    write_json,
)
from services.shared.jobs.state import Reason
from services.shared.training.process import (
    Position,
    RunFailed,
    StopWatch,
    agreed_stop,
    describe_failure,
    fail_with,
    read_run_input,
    reason_of,
    report_failures,
    seed_step,
)

CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)

GLOO = "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate"), "device_out_of_memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "device_out_of_memory"),
        (RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"), "device_out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "device_out_of_memory"),
        (RuntimeError(CPU_MESSAGE), "host_out_of_memory"),
        (MemoryError(), "host_out_of_memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host_out_of_memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full"),
        (RuntimeError("[gloo] Timed out waiting 1800000ms for recv"), "collective_timeout"),
        (
            RuntimeError(f"[{GLOO}] Connection closed by peer [127.0.0.1]:20613"),
            "collective_timeout",
        ),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "crashed"),
        (RunFailed(Reason.NON_FINITE_LOSS, "nan"), "non_finite_loss"),
        (FileNotFoundError(errno.ENOENT, "no such file"), "crashed"),
        (ZeroDivisionError(), "crashed"),
    ],
)
def test_every_error_has_a_stable_reason(error: BaseException, reason: str) -> None:
    assert reason_of(error) == reason


@pytest.mark.parametrize(
    ("message", "request_bytes"),
    [
        (CPU_MESSAGE, 4_000_000_000_000),
        ("HIP out of memory. Tried to allocate 932.00 MiB. GPU 0 has", 932 * 2**20),
        ("CUDA out of memory. Tried to allocate 1.50 GiB.", 3 * 2**29),
        ("CUDA error: out of memory", None),
    ],
)
def test_the_failing_request_is_read_from_the_message(
    message: str, request_bytes: int | None
) -> None:
    failure = describe_failure(RuntimeError(message), rank=3, position=Position("backward", 7))
    assert failure.request_bytes == request_bytes
    assert (failure.rank, failure.phase, failure.step) == (3, "backward", 7)


def test_torchs_own_error_names_the_bytes_it_could_not_get() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**44, dtype=torch.float32)  # 64 TiB: beyond the address space of a process
    failure = describe_failure(caught.value, rank=0, position=Position())
    assert failure.reason is Reason.HOST_OUT_OF_MEMORY
    assert failure.request_bytes == 2**46
    assert failure.allocator is not None
    assert failure.allocator["basis"] == "process"
    resident, peak = failure.allocator["resident_bytes"], failure.allocator["peak_resident_bytes"]
    assert resident is not None
    assert peak is not None
    assert resident <= peak


def test_a_failure_is_reported_when_the_allocator_can_no_longer_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    failure = describe_failure(RuntimeError("first"), rank=0, position=Position())
    assert (failure.message, failure.allocator) == ("first", None)


def test_a_failure_is_written_for_the_worker_and_for_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error_file = tmp_path / "elastic.json"
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(MemoryError), report_failures(run, Position("forward", 4)):
        raise MemoryError("no more")
    failure = read_record(run.failure_file(2), Failure)
    assert failure is not None
    assert (failure.phase, failure.step, failure.reason) == ("forward", 4, "host_out_of_memory")
    assert "raise MemoryError" in failure.traceback
    assert "no more" in json.dumps(json.loads(error_file.read_text()))


def test_a_good_end_leaves_no_failure(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with report_failures(run, Position()):
        pass
    assert run.ranks() == []


def test_fail_with_gives_an_input_error_its_reason() -> None:
    with pytest.raises(RunFailed, match="no such column") as caught, fail_with(Reason.BAD_DATA):
        raise ValueError("no such column")
    assert caught.value.reason is Reason.BAD_DATA


def test_fail_with_leaves_a_full_disk_a_full_disk() -> None:
    with pytest.raises(OSError, match="No space"), fail_with(Reason.BAD_MODEL):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_spec_that_cannot_be_read_is_a_bad_spec(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.spec.write_text('{"job_id": 1}')
    with pytest.raises(RunFailed) as caught:
        read_run_input(run)
    assert caught.value.reason is Reason.BAD_SPEC


@pytest.mark.parametrize("reason", ["cancelled", "handed_back", "timed_out"])
def test_rank_0_sees_a_stop_request_and_all_agree(tmp_path: Path, reason: str) -> None:
    run = RunDirectory(tmp_path)
    first, second = StopWatch(run, rank=0), StopWatch(run, rank=1)
    write_json(run.stop, StopRequest(reason=reason))
    assert second.flags() == [0, 0, 0, 0]
    votes = [x + y for x, y in zip(first.flags(), second.flags(), strict=True)]
    assert agreed_stop(votes) == reason


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock of the ranks in seconds; sleeping advances it."""
    now = [1000.0]
    monkeypatch.setattr("services.shared.training.process.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "services.shared.training.process.time.sleep",
        lambda seconds: now.__setitem__(0, now[0] + seconds),
    )
    return now


def _beat(run: RunDirectory, count: int) -> None:
    write_json(run.heartbeat, WorkerHeartbeat(count=count, lease_seconds=60))


def test_ranks_of_a_silent_worker_stop_before_its_lease_ends(
    tmp_path: Path, clock: list[float]
) -> None:
    run = RunDirectory(tmp_path)
    watches = [StopWatch(run, rank) for rank in (0, 1)]
    _beat(run, 1)
    assert (
        agreed_stop([sum(votes) for votes in zip(*(w.flags() for w in watches), strict=True)])
        is None
    )
    clock[0] += 50
    votes = [sum(votes) for votes in zip(*(w.flags() for w in watches), strict=True)]
    assert clock[0] < 1060
    with pytest.raises(RunFailed) as stopped:
        agreed_stop(votes)
    assert stopped.value.reason is Reason.LOST


def test_ranks_wait_for_a_worker_that_was_suspended_with_them(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    watch = StopWatch(run, rank=0)
    _beat(run, 1)
    assert agreed_stop(watch.flags()) is None
    clock[0] += 3600

    def worker_wakes(seconds: float) -> None:
        clock[0] += seconds
        _beat(run, 2)

    monkeypatch.setattr("services.shared.training.process.time.sleep", worker_wakes)
    assert agreed_stop(watch.flags()) is None


def test_a_long_step_is_not_taken_for_a_silent_worker(tmp_path: Path, clock: list[float]) -> None:
    run = RunDirectory(tmp_path)
    watch = StopWatch(run, rank=0)
    for count in range(1, 5):
        _beat(run, count)
        clock[0] += 300
        _beat(run, count + 100)
        assert agreed_stop(watch.flags()) is None


def test_without_a_heartbeat_file_no_worker_is_expected(tmp_path: Path, clock: list[float]) -> None:
    watch = StopWatch(RunDirectory(tmp_path), rank=0)
    clock[0] += 3600
    assert agreed_stop(watch.flags()) is None


def test_without_a_request_no_rank_stops(tmp_path: Path) -> None:
    assert agreed_stop(StopWatch(RunDirectory(tmp_path), rank=0).flags()) is None


def test_a_step_draws_the_same_numbers_again_and_others_than_its_neighbours() -> None:
    drawn: dict[tuple[int, int], list[list[float]]] = {}
    for step, rank in ((0, 0), (0, 1), (1, 0), (0, 0)):
        seed_step(3, step, rank)
        drawn.setdefault((step, rank), []).append(torch.rand(3).tolist())
    assert drawn[0, 0][0] == drawn[0, 0][1]
    assert drawn[0, 0][0] != drawn[0, 1][0] != drawn[1, 0][0]
