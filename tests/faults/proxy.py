"""A TCP port in front of Postgres' unix socket, which can be cut, frozen, or lose one answer."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from pathlib import Path

_CHUNK = 65_536
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends RST instead of FIN


class Proxy:
    """Carries bytes between workers and Postgres as long as it is whole."""

    def __init__(self, upstream: Path) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._links: set[_Link] = set()
        self._lock = threading.Lock()
        self._is_cut = False
        self.flowing = threading.Event()
        self.flowing.set()
        self.needle: bytes | None = None  # lose the answer of the transaction that holds it
        self.lost_answers = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset every connection and every new one, as a firewall that rejects does."""
        self._is_cut = True
        for link in self._all():
            link.reset()

    def freeze(self) -> None:
        """Carry nothing, in either direction, and say nothing."""
        self.flowing.clear()

    def heal(self) -> None:
        """Carry again; what was frozen arrives."""
        self._is_cut = False
        self.flowing.set()

    def lose_answer(self, needle: bytes = b"") -> None:
        """Let the next COMMIT, of a transaction that sent `needle`, arrive and its answer be lost."""
        self.needle = needle

    def close(self) -> None:
        """Stop listening and reset what is connected."""
        self._listener.close()
        self.heal()
        self.cut()

    def forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    def _all(self) -> list[_Link]:
        with self._lock:
            return list(self._links)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                _reset(client)
                continue
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self._upstream))
            except OSError:
                server.close()
                _reset(client)
                continue
            link = _Link(self, client, server)
            with self._lock:
                self._links.add(link)
            link.start()


class _Link:
    """One connection: two threads that carry bytes."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._sent = b""  # by the client since its last COMMIT
        self._loses = False

    def start(self) -> None:
        for carry in (self._ask, self._answer):
            threading.Thread(target=carry, daemon=True).start()

    def reset(self) -> None:
        _reset(self._client)
        _close(self._server)
        self._proxy.forget(self)

    def _ask(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(_CHUNK):
                self._proxy.flowing.wait()
                self._sent = self._sent[-_CHUNK:] + data
                if b"COMMIT" in data:
                    needle = self._proxy.needle
                    if needle is not None and needle in self._sent:
                        self._proxy.needle, self._loses = None, True
                    self._sent = b""
                self._server.sendall(data)
        self.reset()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(_CHUNK):
                self._proxy.flowing.wait()
                if self._loses:  # Postgres has answered, so it has committed
                    self._proxy.lost_answers += 1
                    break
                self._client.sendall(data)
        self.reset()


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.shutdown(socket.SHUT_RDWR)
    _close(connection)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()


def until(condition: object, *, seconds: float, pause: float = 0.05) -> bool:
    """Return whether `condition()` becomes true in time."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
