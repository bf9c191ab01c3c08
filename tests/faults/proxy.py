"""A TCP proxy for Postgres' Unix socket that can cut or freeze connections, or drop one reply."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from pathlib import Path

_CHUNK = 65_536
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends RST instead of FIN


class PostgresProxy:
    """Forwards bytes between workers and Postgres, unless it is cut or frozen."""

    def __init__(self, upstream: Path) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._links: set[_Link] = set()
        self._lock = threading.Lock()
        self._is_cut = False
        self.flowing = threading.Event()
        self.flowing.set()
        self.statement_to_lose: bytes | None = (
            None  # drop the reply to the COMMIT of the transaction that contains it
        )
        self.lost_replies = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset every connection and every new one, as a firewall that rejects does."""
        self._is_cut = True
        for link in self._all():
            link.reset()

    def freeze(self) -> None:
        """Stop forwarding in both directions without closing connections."""
        self.flowing.clear()

    def heal(self) -> None:
        """Forward again, including what was held back."""
        self._is_cut = False
        self.flowing.set()

    def lose_commit_reply(self, statement: bytes = b"") -> None:
        """Deliver the next COMMIT of a transaction that contains `statement`, but drop its reply."""
        self.statement_to_lose = statement

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
    """One connection: two threads that forward bytes."""

    def __init__(self, proxy: PostgresProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._sent = b""  # by the client since its last COMMIT
        self._drops_reply = False

    def start(self) -> None:
        for forward in (self._forward_requests, self._forward_replies):
            threading.Thread(target=forward, daemon=True).start()

    def reset(self) -> None:
        _reset(self._client)
        _close(self._server)
        self._proxy.forget(self)

    def _forward_requests(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(_CHUNK):
                self._proxy.flowing.wait()
                self._sent = self._sent[-_CHUNK:] + data
                if b"COMMIT" in data:
                    statement = self._proxy.statement_to_lose
                    if statement is not None and statement in self._sent:
                        self._proxy.statement_to_lose, self._drops_reply = None, True
                    self._sent = b""
                self._server.sendall(data)
        self.reset()

    def _forward_replies(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(_CHUNK):
                self._proxy.flowing.wait()
                if self._drops_reply:  # Postgres has replied, so it has committed
                    self._proxy.lost_replies += 1
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
