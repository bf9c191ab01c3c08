"""Limits of a connection that hold before a request exists: header size, deadlines, number of connections.

    connection made ── header_seconds ──> request ── body: its rate, body_seconds ──> response
          ^                                                                              │
          └────────────────────── idle: keep_alive_seconds ──────────────────────────────┘

A client that reads nothing of a response is disconnected after `write_seconds`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.api.limits.local_peer import is_own

log = structlog.get_logger(__name__)

MAX_HEADER_BYTES = 64 * 1024  # of one request; h11 closes the connection beyond it


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How many connections a server holds, and how long each may take for what it sends and reads."""

    max_connections: int = 2000
    max_per_address: int = 500
    header_seconds: float = 10.0
    body_grace_seconds: float = 10.0  # between two checks of the rate
    body_bytes_per_second: float = 1024.0
    body_seconds: float = 3600.0  # for the whole body, at any rate
    write_seconds: float = 60.0
    own_user_only: Callable[[], bool] = lambda: False  # whether other local users are refused


@dataclass
class OpenConnections:
    """The connections of one server, counted by address."""

    limits: ConnectionLimits
    by_address: Counter[str] = field(default_factory=Counter)

    def accept(self, address: str) -> bool:
        """Count a connection; return whether it is within the limits. Close it with `release`."""
        self.by_address[address] += 1
        return (
            self.by_address.total() <= self.limits.max_connections
            and self.by_address[address] <= self.limits.max_per_address
        )

    def release(self, address: str) -> None:
        """Forget a connection."""
        self.by_address[address] -= 1
        if self.by_address[address] <= 0:
            del self.by_address[address]


def limited_protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return uvicorn's HTTP/1.1 protocol with the limits, for one server."""
    connections = OpenConnections(limits)

    class Protocol(LimitedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, connections=connections, **kwargs)

    return Protocol


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 over one connection, closed when its client takes too long."""

    def __init__(self, *args: Any, connections: OpenConnections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open = connections
        self._limits = connections.limits
        self._address = ""
        self._received_bytes = 0  # since the last check of the body's rate
        self._body_ends_at = 0.0
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection and start the deadline of its first request."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if not self._open.accept(self._address):
            self._refuse(503, b"Too many connections.", why="too_many_connections")
            return
        if self._limits.own_user_only() and not self._is_own():
            self._refuse(403, b"This server belongs to another user of the machine.", why="user")
            return
        self._await_header()

    def _is_own(self) -> bool:
        if self.client is None or self.server is None:
            return False
        host, port = self.server
        return is_own(self.client, (host, port or 0))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and its deadlines."""
        self._open.release(self._address)
        for timer in (self._header_timer, self._body_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what has arrived; a deadline runs while a header or a body is incomplete."""
        if self.transport.is_closing():
            return
        self._received_bytes += len(data)
        super().data_received(data)
        self._watch_body()
        if self.conn.their_state is h11.IDLE:
            self._await_header()  # what has arrived is not a whole header yet
        else:
            self._end_header()

    def on_response_complete(self) -> None:
        """Go on with the next request of the connection."""
        super().on_response_complete()
        self._watch_body()

    def pause_writing(self) -> None:
        """Give a client that reads nothing a deadline."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_seconds, self._abort)

    def resume_writing(self) -> None:
        """End the deadline of the client's reading."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_body(self) -> None:
        """Measure the rate while the client has a body to send."""
        if self.conn.their_state is h11.SEND_BODY:
            if self._body_timer is None:
                self._body_ends_at = self.loop.time() + self._limits.body_seconds
                self._await_body()
        elif self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _await_header(self) -> None:
        if self._header_timer is None:
            self._header_timer = self._later(self._limits.header_seconds, self._header_is_late)

    def _end_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_is_late(self) -> None:
        self._header_timer = None
        self._refuse(408, b"The header did not arrive in time.", why="header_deadline")

    def _await_body(self) -> None:
        self._received_bytes = 0
        left = self._body_ends_at - self.loop.time()
        self._body_timer = self._later(min(self._limits.body_grace_seconds, left), self._check_body)

    def _check_body(self) -> None:
        """Close the connection of a body that arrives too slowly, unless it is we who do not read."""
        self._body_timer = None
        if self.conn.their_state is not h11.SEND_BODY or self.transport.is_closing():
            return
        if self.loop.time() >= self._body_ends_at:
            self._refuse(408, b"The body did not arrive in time.", why="body_deadline")
            return
        expected = self._limits.body_bytes_per_second * self._limits.body_grace_seconds
        if not self.flow.read_paused and self._received_bytes < expected:
            self._refuse(408, b"The body arrives too slowly.", why="body_rate")
            return
        self._await_body()

    def _later(self, seconds: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, act)

    def _refuse(self, status: int, message: bytes, *, why: str) -> None:
        """Answer if no response has begun, and close."""
        log.info("connection_closed", why=why, address=self._address)
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started:
            self.transport.write(
                b"HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=utf-8\r\n"
                b"Content-Length: %d\r\nConnection: close\r\n\r\n%s"
                % (status, _REASONS[status], len(message), message)
            )
        self.transport.close()

    def _abort(self) -> None:
        log.info("connection_closed", why="write_deadline", address=self._address)
        self.transport.abort()


_REASONS = {403: b"Forbidden", 408: b"Request Timeout", 503: b"Service Unavailable"}
