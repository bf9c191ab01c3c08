"""The fork server: imports modules once, then forks a fresh child for each call.

    python -m services.shared.sandbox.server MODULE...

A fork of this small process takes two milliseconds, where a new interpreter takes a second. It has one
thread, so that a fork is safe, and no secrets: its environment has none. Its standard input is the
control socket; it ends when the client closes that, and its children end with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from services.shared.sandbox.codec import argument_type, function_named, result_type
from services.shared.sandbox.limits import Limits, apply_limits, end_with_parent
from services.shared.sandbox.protocol import (
    CALL,
    EXIT_CODE,
    EXIT_OUT_OF_MEMORY,
    EXIT_RAISED,
    READY,
    receive_part,
)

_TRAILER_SECONDS = 5.0  # a client that reads nothing for this long has lost interest
_ROOT = Path(__file__).resolve().parents[3]


class _Closable(Protocol):
    def close(self) -> None: ...


Children = dict[int, socket.socket]  # by process id; the socket of the call


def main() -> None:
    """Import the modules named in the arguments and serve until the control socket is closed."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the client, which closes the socket
    control = socket.socket(fileno=os.dup(0))
    _silence(0)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    control.sendall(READY)
    _serve(control)


def _serve(control: socket.socket) -> None:
    wake, wakes = socket.socketpair()
    for end in (wake, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: Children = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if wake in ready:
                _drain(wake)
                _reap(children)
            if control in ready:
                data, descriptors, _, _ = socket.recv_fds(control, len(CALL), 1)
                if not data:
                    return
                for descriptor in descriptors:
                    _fork(descriptor, children, inherited=[control, wake, wakes, selector])


def _fork(descriptor: int, children: Children, *, inherited: Sequence[_Closable]) -> None:
    server = os.getpid()
    pid = os.fork()
    connection = socket.socket(fileno=descriptor)
    if pid:
        children[pid] = connection
        return
    code = EXIT_RAISED
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent(server)
        _silence(2)  # a log file may be larger than what the call may write
        # A copy of another call's socket would keep its client waiting.
        for each in [*inherited, *children.values()]:
            each.close()
        code = _run(connection)
    finally:
        os._exit(code)


def _run(connection: socket.socket) -> int:
    """Run the call that arrives and write its result; return the exit code of the child."""
    try:
        header = json.loads(receive_part(connection))
        apply_limits(Limits(**header["limits"]))
        function = function_named(header["function"])
        argument = argument_type(function).validate_json(receive_part(connection))
        result = result_type(function).dump_json(function(argument))
    except MemoryError:
        return EXIT_OUT_OF_MEMORY
    except (EOFError, ConnectionError):
        return 0  # the client has left
    except Exception as error:  # noqa: BLE001 - the edge of a process: the client reports it
        with contextlib.suppress(OSError):
            connection.sendall(_place(error).encode())
        return EXIT_RAISED
    with contextlib.suppress(ConnectionError):
        connection.sendall(result)
    return 0


def _place(error: Exception) -> str:
    """Return the type of an error and where it was raised: its message may quote a user's text."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(str(_ROOT))] or frames
    last = ours[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"


def _silence(descriptor: int) -> None:
    with Path(os.devnull).open("r+b", buffering=0) as null:
        os.dup2(null.fileno(), descriptor)


def _drain(wake: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while wake.recv(4096):
            pass


def _reap(children: Children) -> None:
    """Tell the clients of children that have ended how they did."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid) as connection, contextlib.suppress(OSError):
            connection.settimeout(_TRAILER_SECONDS)
            connection.sendall(EXIT_CODE.pack(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
