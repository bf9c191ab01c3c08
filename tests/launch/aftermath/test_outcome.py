import json
from pathlib import Path
from typing import Any

import pytest

from services.shared.jobs.documents import RecipeFields
from services.shared.jobs.outcome import End
from services.shared.jobs.run_directory import Failure, Report, RunDirectory, write_json
from services.shared.jobs.state import Reason
from services.shared.launch.aftermath.outcome import MemoryFailure, RootCause, determine_outcome
from services.shared.launch.supervise import Force, RunExit, StopReason
from tests.factories import diagnosis_document, plan_document

SUMMARY = """some output of rank 0
============================================================
services.trainer.main FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_00:00:01
  host      : node
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 100)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : node
  rank      : 3 (local_rank: 3)
  exitcode  : {exit_code} (pid: 103)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 103
============================================================
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def _judge(
    run: RunDirectory,
    ending: RunExit,
    *,
    may_retry: bool = False,
    found: MemoryFailure = MemoryFailure(None, {}),
) -> Any:
    return determine_outcome(run, ending, examine=lambda cause: found, may_retry=may_retry)


def _fail(run: RunDirectory, rank: int, reason: Reason, *, time: float, message: str = "m") -> None:
    failure = Failure(
        time=time, rank=rank, phase="backward", step=3, reason=reason, message=message
    )
    write_json(run.failure_file(rank), failure)


def _report(run: RunDirectory, **fields: Any) -> None:
    write_json(run.report, Report(**fields))


def test_a_report_of_success_is_a_success(run: RunDirectory) -> None:
    _report(run, outcome="succeeded", steps=9)
    outcome = _judge(run, RunExit(exit_code=0))
    assert (outcome.end, outcome.reason, outcome.report.steps) == (End.SUCCEEDED, None, 9)


def test_exit_code_zero_without_a_report_is_a_failure(run: RunDirectory) -> None:
    assert _judge(run, RunExit(exit_code=0)).end is End.FAILED


@pytest.mark.parametrize(
    ("stop", "end", "reason"),
    [
        ("cancelled", End.CANCELLED, Reason.CANCELLED),
        ("handed_back", End.HANDED_BACK, None),
        ("timed_out", End.FAILED, Reason.TIMED_OUT),
    ],
)
@pytest.mark.parametrize("force", list(Force))
def test_ranks_that_stop_on_request_end_with_its_reason(
    run: RunDirectory, stop: Any, end: End, reason: Reason | None, force: Force
) -> None:
    if force is Force.NONE:
        _report(run, outcome="stopped", stop_reason=stop)
    else:  # nothing was saved, and SIGTERM may make ranks fail in their own words
        _fail(run, 0, Reason.CRASHED, time=1)
    outcome = _judge(run, RunExit(exit_code=-15, stop=stop, force=force))
    assert (outcome.end, outcome.reason) == (end, reason)


def test_success_reached_before_the_stop_was_noticed_is_kept(run: RunDirectory) -> None:
    _report(run, outcome="succeeded")
    assert _judge(run, RunExit(exit_code=0, stop="cancelled")).end is End.SUCCEEDED


def test_ranks_that_received_a_signal_themselves_are_handed_back(run: RunDirectory) -> None:
    _report(run, outcome="stopped", stop_reason="handed_back")
    assert _judge(run, RunExit(exit_code=0)).end is End.HANDED_BACK


def test_a_collective_timeout_is_secondary_to_the_rank_that_failed(run: RunDirectory) -> None:
    _fail(run, 0, Reason.COLLECTIVE_TIMEOUT, time=1)  # clocks and writes may be out of order
    _fail(run, 2, Reason.DEVICE_OUT_OF_MEMORY, time=2, message="HIP out of memory")
    _fail(run, 1, Reason.COLLECTIVE_TIMEOUT, time=3)
    outcome = _judge(run, RunExit(exit_code=1))
    assert (outcome.reason, outcome.failed_rank) == (Reason.DEVICE_OUT_OF_MEMORY, 2)
    assert outcome.message == "HIP out of memory"


def test_the_first_of_several_failures_is_the_root_cause(run: RunDirectory) -> None:
    _fail(run, 0, Reason.CRASHED, time=2)
    _fail(run, 1, Reason.NON_FINITE_LOSS, time=1)
    outcome = _judge(run, RunExit(exit_code=1))
    assert (outcome.reason, outcome.failed_rank) == (Reason.NON_FINITE_LOSS, 1)


def test_timeouts_on_every_rank_and_no_dead_rank_are_a_collective_timeout(
    run: RunDirectory,
) -> None:
    _fail(run, 0, Reason.COLLECTIVE_TIMEOUT, time=2)
    _fail(run, 1, Reason.COLLECTIVE_TIMEOUT, time=1)
    outcome = _judge(run, RunExit(exit_code=1))
    assert (outcome.reason, outcome.failed_rank) == (Reason.COLLECTIVE_TIMEOUT, 1)


@pytest.mark.parametrize(
    ("counted", "reason"),
    [
        (True, Reason.HOST_OUT_OF_MEMORY),
        (False, Reason.CRASHED),
        (None, Reason.CRASHED),
    ],
)
def test_the_oom_kill_counter_identifies_a_killed_rank(
    run: RunDirectory, counted: bool | None, reason: Reason
) -> None:
    _fail(run, 0, Reason.COLLECTIVE_TIMEOUT, time=1)
    run.log.write_text(SUMMARY.format(exit_code=-9))
    outcome = _judge(run, RunExit(exit_code=1, oom_killed=counted))
    assert (outcome.reason, outcome.failed_rank) == (reason, 3)


@pytest.mark.parametrize("exit_code", [1, -9])
@pytest.mark.parametrize(("counted", "end"), [(True, End.FAILED), (False, End.RETRY)])
def test_a_kill_from_outside_gives_the_job_another_attempt(
    run: RunDirectory, exit_code: int, counted: bool, end: End
) -> None:
    if exit_code == 1:  # a rank was killed, not torchrun
        run.log.write_text(SUMMARY.format(exit_code=-9))
    outcome = _judge(run, RunExit(exit_code=exit_code, oom_killed=counted))
    assert (outcome.end, outcome.recipe_changes) == (end, {})


def test_torchrun_itself_killed_by_the_kernel_is_host_memory(run: RunDirectory) -> None:
    outcome = _judge(run, RunExit(exit_code=-9, oom_killed=True))
    assert (outcome.reason, outcome.failed_rank) == (Reason.HOST_OUT_OF_MEMORY, None)


def test_a_segmentation_fault_names_rank_and_signal(run: RunDirectory) -> None:
    run.log.write_text(SUMMARY.format(exit_code=-11))
    outcome = _judge(run, RunExit(exit_code=1))
    assert (outcome.reason, outcome.failed_rank) == (Reason.CRASHED, 3)
    assert "SIGSEGV" in outcome.message


def test_the_elastic_error_file_replaces_a_missing_failure_file(run: RunDirectory) -> None:
    run.log.write_text(SUMMARY.format(exit_code=1))
    run.rank_dir(0).mkdir(parents=True)
    error = run.path / "torchrun/none_x/attempt_0/3/error.json"
    error.parent.mkdir(parents=True)
    text = "Traceback ...\nRuntimeError: what the rank said"
    error.write_text(json.dumps({"message": {"message": "m", "extraInfo": {"py_callstack": text}}}))
    outcome = _judge(run, RunExit(exit_code=1))
    assert (outcome.reason, outcome.message) == (Reason.CRASHED, "RuntimeError: what the rank said")


def test_ranks_that_never_started_are_a_failed_launch(run: RunDirectory) -> None:
    run.log.write_text("Traceback:\nModuleNotFoundError: No module named 'services.nowhere'\n")
    outcome = _judge(run, RunExit(exit_code=1))
    assert outcome.reason is Reason.LAUNCH_FAILED
    assert "No module named 'services.nowhere'" in outcome.message


MEMORY = [Reason.DEVICE_OUT_OF_MEMORY, Reason.HOST_OUT_OF_MEMORY, Reason.NOT_SHARDED]


@pytest.mark.parametrize("reason", list(Reason))
def test_memory_failures_and_no_others_are_examined(run: RunDirectory, reason: Reason) -> None:
    _fail(run, 0, reason, time=1)
    asked: list[RootCause] = []

    def examine(cause: RootCause) -> MemoryFailure:
        asked.append(cause)
        return MemoryFailure(diagnosis_document(cause="capacity"), {})

    outcome = determine_outcome(run, RunExit(exit_code=1), examine=examine, may_retry=False)
    assert bool(asked) is (reason in MEMORY)
    assert (outcome.diagnosis is not None) is (reason in MEMORY)


@pytest.mark.parametrize(
    ("may_retry", "changes", "stop", "end"),
    [
        (True, {"optimizer_in_backward": True}, None, End.RETRY),
        (True, {}, None, End.FAILED),
        (False, {"optimizer_in_backward": True}, None, End.FAILED),
        (True, {"optimizer_in_backward": True}, "cancelled", End.CANCELLED),
        (True, {"optimizer_in_backward": True}, "handed_back", End.HANDED_BACK),
    ],
)
def test_a_remedy_that_fits_gives_another_attempt_to_a_job_that_requested_it(
    run: RunDirectory, may_retry: bool, changes: RecipeFields, stop: StopReason | None, end: End
) -> None:
    _fail(run, 0, Reason.DEVICE_OUT_OF_MEMORY, time=1)
    found = MemoryFailure(
        diagnosis_document(cause="capacity"),
        changes,
        plan_document(verdict="fits") if changes else None,
    )
    outcome = _judge(run, RunExit(exit_code=1, stop=stop), may_retry=may_retry, found=found)
    assert outcome.end is end
    assert outcome.recipe_changes == (changes if end is End.RETRY else {})
    assert outcome.plan == (found.plan if end is End.RETRY else None)


def test_a_teacher_that_the_plan_moves_is_a_remedy_without_a_change_of_the_recipe(
    run: RunDirectory,
) -> None:
    _fail(run, 0, Reason.DEVICE_OUT_OF_MEMORY, time=1)
    found = MemoryFailure(
        diagnosis_document(cause="capacity"), {}, plan_document(teacher_placement="sharded")
    )
    outcome = _judge(run, RunExit(exit_code=1), may_retry=True, found=found)
    assert (outcome.end, outcome.plan) == (End.RETRY, found.plan)


def test_the_failure_of_the_rank_is_kept_with_the_outcome(run: RunDirectory) -> None:
    _fail(run, 1, Reason.DEVICE_OUT_OF_MEMORY, time=1, message="HIP out of memory")
    failure = _judge(run, RunExit(exit_code=1)).failure
    assert (failure["rank"], failure["phase"], failure["step"]) == (1, "backward", 3)
    assert failure["message"] == "HIP out of memory"


def test_measured_peaks_and_observed_sharding_are_kept_for_every_end(
    run: RunDirectory,
) -> None:
    _fail(run, 1, Reason.CRASHED, time=1)
    lines = [
        {"time": 1, "phase": "wrap", "allocated_bytes": 5, "observed": {"sharded_units": 4}},
        {"time": 2, "phase": "forward", "allocated_bytes": 5, "peak_allocated_bytes": 9},
        {"time": 3, "phase": "forward", "allocated_bytes": 5, "peak_allocated_bytes": 8},
    ]
    run.memory_file(1).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    outcome = _judge(run, RunExit(exit_code=1))
    assert outcome.measured == {"1": {"wrap": 5, "forward": 9}}
    assert outcome.observed == {"1": {"sharded_units": 4}}


def test_ranks_that_stopped_without_a_worker_heartbeat_get_another_attempt(
    run: RunDirectory,
) -> None:
    _fail(run, 0, Reason.LOST, time=1.0, message="The worker of this run has gone silent.")
    outcome = _judge(run, RunExit(exit_code=1))
    assert (outcome.end, outcome.reason) == (End.RETRY, Reason.LOST)
