"""A client of the fork server, which starts it, and starts it again where it has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.shared.sandbox.errors import SandboxBusy, SandboxFailed, TooLarge, TooSlow
from services.shared.sandbox.limits import Limits
from services.shared.sandbox.protocol import (
    CALL,
    EXIT_CODE,
    EXIT_OUT_OF_MEMORY,
    EXIT_RAISED,
    READY,
    Call,
    send_call,
)

_START_SECONDS = 60.0  # importing takes one; a cold or shared disk takes longer
_MARGIN_SECONDS = 10.0  # for the server to notice that a child has ended
_MAX_RESULT_BYTES = 64 * 2**20
# Everything else of the environment stays behind: passwords and tokens of any name.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # no fork copies a thread
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    control: socket.socket
    lock: threading.Lock


class ForkServer:
    """Runs calls in children of a fork server that has imported `modules`; thread-safe."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = list(modules)
        self._running: _Running | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The process id of the server, None while it has not been started."""
        return None if self._running is None else self._running.process.pid

    def start(self) -> None:
        """Start the server and wait until it is ready; the first call does so too.

        Raises SandboxFailed.
        """
        with self._lock:
            if self._running is not None and self._running.process.poll() is None:
                return
            self._stop()
            self._running = _start(self._modules)

    def close(self) -> None:
        """End the server and with it all calls in progress, which raise SandboxFailed."""
        with self._lock:
            self._stop()

    def call(self, call: Call) -> bytes:
        """Return the result of a call as JSON. Raises TooSlow, TooLarge, SandboxBusy, SandboxFailed."""
        connection = self._connect()
        with connection:
            connection.settimeout(call.limits.wall_seconds + _MARGIN_SECONDS)
            try:
                with contextlib.suppress(ConnectionError):  # the child ended before it read all
                    send_call(connection, call)
                reply = _read_all(connection)
            except TimeoutError as error:
                raise SandboxBusy("a call did not end in time") from error
        return _result(reply, call.limits)

    def _connect(self) -> socket.socket:
        for _ in range(2):
            self.start()
            running = self._running
            if running is None:
                break
            ours, theirs = socket.socketpair()
            try:
                with theirs, running.lock:
                    socket.send_fds(running.control, [CALL], [theirs.fileno()])
                return ours
            except OSError:  # it has ended meanwhile
                ours.close()
        raise SandboxFailed("the fork server does not accept calls")

    def _stop(self) -> None:
        if self._running is None:
            return
        self._running.control.close()
        self._running.process.kill()
        self._running.process.wait()
        self._running = None


def _start(modules: list[str]) -> _Running:
    ours, theirs = socket.socketpair()
    env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.shared.sandbox.server", *modules],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parents[3],  # where `services` is importable
            env=env | _SETTINGS,
            start_new_session=True,
        )
    ours.settimeout(_START_SECONDS)
    try:
        is_ready = ours.recv(len(READY)) == READY
    except OSError:
        is_ready = False
    if not is_ready:
        ours.close()
        process.kill()
        process.wait()
        raise SandboxFailed("the fork server does not start")
    return _Running(process, ours, threading.Lock())


def _read_all(connection: socket.socket) -> bytes:
    parts = bytearray()
    # A reset is the end of a child that has not read all of its call; what it wrote comes before it.
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            parts += part
            if len(parts) > _MAX_RESULT_BYTES:
                raise SandboxFailed(f"a result is larger than {_MAX_RESULT_BYTES:,} bytes")
    return bytes(parts)


def _result(reply: bytes, limits: Limits) -> bytes:
    content, trailer = reply[: -EXIT_CODE.size], reply[-EXIT_CODE.size :]
    if len(trailer) < EXIT_CODE.size:
        raise SandboxFailed("the fork server has ended")
    (code,) = EXIT_CODE.unpack(trailer)
    if code == 0:
        return content
    if code == EXIT_RAISED:
        raise SandboxFailed(content.decode("utf-8", "replace")[:200])
    if code == -signal.SIGXCPU:
        raise TooSlow(limits.seconds)
    if code == -signal.SIGALRM:
        raise SandboxBusy(f"a call had no time to finish within {limits.wall_seconds:g} s")
    if code == EXIT_OUT_OF_MEMORY or code < 0:
        # A library that gets no memory may also abort, and the kernel may have ended the child first.
        raise TooLarge(limits.memory_bytes)
    raise SandboxFailed(f"a child ended with exit code {code}")
