"""A call in a sandbox returns its result, or ends at a limit that the kernel keeps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from services.shared.sandbox.errors import (
    SandboxBusy,
    SandboxFailed,
    TooLarge,
    TooSlow,
)
from services.shared.sandbox.fork_server import ForkServer
from services.shared.sandbox.limits import Limits
from services.shared.sandbox.protocol import Call
from services.shared.sandbox.sandbox import Sandbox
from tests.sandbox import calls

MIB = 2**20
LIMITS = Limits(seconds=5, wall_seconds=20, memory_bytes=512 * MIB)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["tests.sandbox.calls"])
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _test_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of these tests have the name of a module of ours for the server."""
    monkeypatch.setenv("HUSH_PASSWORD", "hush")


@pytest.fixture
def sandbox(server: ForkServer) -> Sandbox:
    return Sandbox(server, limits=LIMITS)


def limited(server: ForkServer, **limits: float) -> Sandbox:
    values = {"seconds": 5, "wall_seconds": 20, "memory_bytes": 512 * MIB} | limits
    return Sandbox(server, limits=Limits(**values))  # type: ignore[arg-type]


def test_a_call_returns_the_result_of_its_function(sandbox: Sandbox) -> None:
    assert sandbox.run(calls.double, 21) == 42
    assert sandbox.run(calls.swap, calls.Pair(1, "é\x00")) == calls.Pair(2, "\x00é")


def test_each_call_has_a_process_of_its_own(sandbox: Sandbox) -> None:
    assert sandbox.run(calls.count, "") == 1
    assert sandbox.run(calls.count, "") == 1
    assert sandbox.run(calls.process_id, "") != os.getpid()


def test_a_loop_ends_at_the_limit_of_cpu_time(server: ForkServer) -> None:
    started = time.monotonic()
    with pytest.raises(TooSlow, match="did not finish within 1 s"):
        limited(server, seconds=1).run(calls.loop, "")
    assert time.monotonic() - started < 10


def test_a_loop_within_a_library_ends_at_the_limit_too(server: ForkServer) -> None:
    with pytest.raises(TooSlow):
        limited(server, seconds=1).run(calls.loop_in_a_pattern, 40)


def test_a_call_that_waits_for_ever_ends_after_its_wall_clock_time(server: ForkServer) -> None:
    with pytest.raises(SandboxBusy, match=r"0\.3 s"):
        limited(server, wall_seconds=0.3).run(calls.sleep, 60.0)


def test_a_call_that_needs_too_much_memory_ends(server: ForkServer) -> None:
    before = psutil.Process().memory_info().rss
    with pytest.raises(TooLarge, match="536,870,912 bytes"):
        limited(server).run(calls.allocate, 2**33)
    assert psutil.Process().memory_info().rss - before < 16 * MIB


def test_a_call_that_is_killed_counts_as_too_large(sandbox: Sandbox) -> None:
    with pytest.raises(TooLarge):
        sandbox.run(calls.die, int(signal.SIGKILL))


def test_a_call_writes_no_files_without_permission(sandbox: Sandbox, tmp_path: object) -> None:
    with pytest.raises(SandboxFailed, match="OSError"):
        sandbox.run(calls.write, f"{tmp_path}/file")


def test_an_exception_is_reported_by_its_place_without_its_message(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed, match=r"ZeroDivisionError at calls\.py:\d+") as failure:
        sandbox.run(calls.divide, "hush")
    assert "hush" not in str(failure.value)


def test_only_our_own_functions_can_be_called(server: ForkServer) -> None:
    with pytest.raises(SandboxFailed, match="ValueError"):
        server.call(Call("os:getpid", LIMITS, b'""'))


def test_a_process_gets_no_secrets_and_no_open_files(sandbox: Sandbox) -> None:
    assert sandbox.run(calls.environment, "") == []
    # stdin, stdout, stderr and the socket of the call, and the one that lists them
    assert sandbox.run(calls.open_files, "") <= 5


def test_a_server_that_was_killed_is_started_again(server: ForkServer, sandbox: Sandbox) -> None:
    assert sandbox.run(calls.double, 1) == 2
    assert server.pid is not None
    psutil.Process(server.pid).kill()
    psutil.Process(server.pid).wait(5)
    assert sandbox.run(calls.double, 2) == 4


def test_closing_ends_the_server_and_the_calls_in_progress() -> None:
    server = ForkServer(["tests.sandbox.calls"])
    server.start()
    assert server.pid is not None
    process = psutil.Process(server.pid)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            Sandbox(server, limits=LIMITS).run(calls.sleep, 60.0)
        except SandboxFailed as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 10
    while not process.children():
        assert time.monotonic() < deadline
    (child,) = process.children()
    server.close()
    thread.join(10)
    assert [type(failure) for failure in failures] == [SandboxFailed]
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_calls_over_the_limit_are_refused_at_once(server: ForkServer) -> None:
    sandbox = Sandbox(server, limits=LIMITS, max_running=1, max_waiting=1)
    threads = [threading.Thread(target=sandbox.run, args=[calls.sleep, 1.0]) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while sandbox.num_places < 2:
        assert time.monotonic() < deadline
    started = time.monotonic()
    with pytest.raises(SandboxBusy, match="2 calls"):
        sandbox.run(calls.double, 1)
    assert time.monotonic() - started < 0.5
    for thread in threads:
        thread.join(20)
    assert sandbox.run(calls.double, 1) == 2


def test_one_caller_leaves_places_for_others(server: ForkServer) -> None:
    sandbox = Sandbox(server, limits=LIMITS, max_running=2, max_waiting=0)
    thread = threading.Thread(
        target=lambda: sandbox.run(calls.sleep, 1.0, caller="one"), daemon=True
    )
    thread.start()
    deadline = time.monotonic() + 10
    while sandbox.num_places < 1:
        assert time.monotonic() < deadline
    with pytest.raises(SandboxBusy):
        sandbox.run(calls.double, 1, caller="one")
    assert sandbox.run(calls.double, 1, caller="other") == 2
    thread.join(20)


def test_many_threads_call_at_once(server: ForkServer) -> None:
    sandbox = Sandbox(server, limits=LIMITS, max_running=4, max_waiting=40)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(sandbox.run(calls.double, n)))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [2 * n for n in range(20)]


def test_the_fork_servers_of_the_api_have_one_thread() -> None:
    """Otherwise a fork could copy a lock that no thread of the child ever releases."""
    from tests.sandboxes import sandboxes

    for sandbox in (sandboxes().calculations, sandboxes().validations):
        sandbox.server.start()
        assert psutil.Process(sandbox.server.pid).num_threads() == 1
