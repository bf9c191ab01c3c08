"""A server that is to stop takes no new connection, and answers what it has begun to read."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable

import uvicorn

from services.api.app import create_app
from services.api.server import GRACE_SECONDS, server_config
from services.api.settings import ApiSettings
from tests.api.harness import Platform

BODY = b'{"log": "CUDA out of memory. Tried to allocate 2.00 GiB."}'
HEAD = (
    b"POST /diagnoses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)


def test_a_request_in_flight_is_answered_and_no_new_one_is_taken(offline: Platform) -> None:
    settings = ApiSettings(**{**offline.settings.model_dump(), "port": 0})
    config = server_config(create_app(offline.context()), settings)
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    address = listener.getsockname()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        _until(lambda: server.started)
        with (
            socket.create_connection(address) as begun,
            socket.create_connection(address) as idle,
        ):
            begun.sendall(HEAD + BODY[:10])
            _until(
                lambda: (
                    len(server.server_state.connections) == 2
                    and len(server.server_state.tasks) == 1
                )
            )
            # What uvicorn does on SIGTERM; only the main thread of a process can receive one.
            server.handle_exit(signal.SIGTERM, None)
            assert _read(idle) == b""  # kept alive, closed at once
            _until(lambda: not _connects(address))
            begun.sendall(BODY[10:])
            assert _read(begun).startswith(b"HTTP/1.1 200 ")
    finally:
        server.should_exit = True
        thread.join(GRACE_SECONDS + 10)
        listener.close()
    assert not thread.is_alive()


def _connects(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=5).close()
    except OSError:
        return False
    return True


def _read(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    found = b""
    while data := connection.recv(65536):
        found += data
    return found


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
