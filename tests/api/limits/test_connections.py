"""A connection has limits before any key is known: size and deadline of a header, rate of a body."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from services.api.app import create_app
from services.api.server import server_config
from services.api.settings import ApiSettings
from tests.api.harness import Platform

HEAD = b"POST /diagnoses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@contextmanager
def serve(platform: Platform, **settings: object) -> Iterator[tuple[str, int]]:
    """The application behind the production server on a free port of the loopback interface."""
    platform.settings = ApiSettings(**{**platform.settings.model_dump(), "port": 0, **settings})
    config = server_config(create_app(platform.context()), platform.settings)
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        _until(lambda: server.started)
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"


def _answer(connection: socket.socket) -> bytes:
    """Read until the server closes; a connection reset is a closed one."""
    connection.settimeout(10)
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionError:
        pass
    return found


def test_an_endless_header_is_closed_within_128_kib(offline: Platform) -> None:
    with serve(offline) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Endless: ")
        sent = 0
        try:
            while sent < 4 * 2**20:
                connection.sendall(b"a" * 4096)
                sent += 4096
                time.sleep(0.0005)
        except ConnectionError:
            pass
        assert sent <= 256 * 1024  # 64 KiB, and what the kernel holds between both


def test_a_header_that_never_ends_has_a_deadline(offline: Platform) -> None:
    with (
        serve(offline, header_seconds=0.3) as address,
        socket.create_connection(address) as connection,
    ):
        started = time.monotonic()
        connection.sendall(b"GET /livez HTTP/1.1\r\n")
        assert b" 408 " in _answer(connection)
        assert time.monotonic() - started < 5


def test_a_connection_that_sends_nothing_has_a_deadline(offline: Platform) -> None:
    with (
        serve(offline, header_seconds=0.3) as address,
        socket.create_connection(address) as connection,
    ):
        assert b" 408 " in _answer(connection)


def test_a_body_that_stalls_is_closed(offline: Platform) -> None:
    limits = {"body_grace_seconds": 0.3}
    with serve(offline, **limits) as address, socket.create_connection(address) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
        assert b" 408 " in _answer(connection)


def test_a_slow_body_that_keeps_the_rate_is_read(offline: Platform) -> None:
    limits = {"body_grace_seconds": 0.3, "body_bytes_per_second": 10}
    with serve(offline, **limits) as address, socket.create_connection(address) as connection:
        body = b'{"log": "%s"}' % (b"a" * 100)
        connection.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 10):
            connection.sendall(body[start : start + 10])
            time.sleep(0.05)
        assert b" 200 " in _answer(connection)


def test_a_body_that_keeps_the_rate_has_a_deadline_all_the_same(offline: Platform) -> None:
    limits = {"body_seconds": 1, "body_grace_seconds": 0.3, "body_bytes_per_second": 1}
    with serve(offline, **limits) as address, socket.create_connection(address) as connection:
        started = time.monotonic()
        connection.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        connection.settimeout(0.05)
        found = b""
        while not found and time.monotonic() < started + 20:
            connection.sendall(b" " * 10)
            try:
                found = connection.recv(1000)
            except TimeoutError:
                continue
        assert b" 408 " in found
        assert b"did not arrive in time" in found
        assert time.monotonic() - started < 10


def test_a_connection_answers_several_requests_with_pauses_between(offline: Platform) -> None:
    with (
        serve(offline, header_seconds=0.5) as address,
        socket.create_connection(address) as connection,
    ):
        connection.settimeout(5)
        for _ in range(4):
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b" 200 " in connection.recv(65536)
            time.sleep(0.3)


def test_connections_beyond_the_limit_are_refused_and_freed_again(offline: Platform) -> None:
    with serve(offline, max_connections_per_address=3) as address:
        kept = [socket.create_connection(address) for _ in range(3)]
        _until(lambda: _status_of_livez(address) == b"503")
        for connection in kept:
            connection.close()
        _until(lambda: _status_of_livez(address) == b"200")


def _status_of_livez(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return [*_answer(connection).split(b" "), b"", b""][1]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline


def test_a_client_cannot_choose_the_address_it_is_counted_by(offline: Platform) -> None:
    config = server_config(create_app(offline.context()), offline.settings)
    assert not config.proxy_headers  # X-Forwarded-For from loopback is not read
