"""A client that costs little itself: many connections, served in rounds by one thread.

For measurements of a million requests, where a thread and an `http.client` for each connection would take
more CPU time than the server.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Sent:
    """What a burst of requests came to."""

    requests: int
    refused: int  # any status but 200
    seconds: float


def send_rounds(port: int, texts: Sequence[str], *, connections: int = 64) -> Sent:
    """Send each text once to `/predict`, long ones truncated: one on every connection, then read all responses."""
    started, refused = time.perf_counter(), 0
    with ExitStack() as stack:
        opened = [stack.enter_context(_Connection(port)) for _ in range(connections)]
        for start in range(0, len(texts), connections):
            chunk = texts[start : start + connections]
            busy = opened[: len(chunk)]
            for connection, text in zip(busy, chunk, strict=True):
                connection.ask(text)
            refused += sum(connection.status() != 200 for connection in busy)
    return Sent(len(texts), refused, time.perf_counter() - started)


class _Connection:
    """A connection that is opened again where the server closed it because a busy machine left it idle."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._request = b""
        self._open()

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def ask(self, text: str) -> None:
        body = json.dumps({"inputs": text, "truncate": True}).encode()
        self._request = (
            b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        with suppress(ConnectionError):  # `status` finds that too
            self._socket.sendall(self._request)

    def status(self) -> int:
        """Read one whole response and return its status. Raises ConnectionError if it breaks twice."""
        try:
            return self._read()
        except ConnectionError:
            self._socket.close()
            self._open()
            self._socket.sendall(self._request)
            return self._read()

    def _open(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port), _TIMEOUT_SECONDS)

    def _read(self) -> int:
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._more()
        head, _, body = received.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += self._more()
        return int(head[9:12])

    def _more(self) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data
