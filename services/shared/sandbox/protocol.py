"""What the fork server and its clients write to each other.

A client sends the server one byte with one end of a socket pair; the server forks a child that reads a
call from that socket and writes its result there. When the child has ended, however it did, the server
adds the child's exit code and closes the socket.

    client ── ready? ──> server                        control socket, for the server's life
    client ── fd ──────> server ── fork ──> child
    client ── header, argument ───────────> child      call socket, for one call
    client <── result ───────────────────── child
    client <── exit code ── server
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass

from services.shared.sandbox.limits import Limits

READY = b"r"
CALL = b"c"
EXIT_OUT_OF_MEMORY = 3
EXIT_RAISED = 4  # the result is the place where the function raised
_LENGTH = struct.Struct("!Q")
EXIT_CODE = struct.Struct("!i")


@dataclass(frozen=True)
class Call:
    """A function's name, its argument as JSON, and its limits."""

    function: str
    limits: Limits
    argument: bytes


def send_call(connection: socket.socket, call: Call) -> None:
    """Write a call. Raises OSError."""
    header = json.dumps({"function": call.function, "limits": asdict(call.limits)}).encode()
    for part in (header, call.argument):
        connection.sendall(_LENGTH.pack(len(part)) + part)


def receive_part(connection: socket.socket) -> bytes:
    """Read the header of a call, or its argument. Raises EOFError."""
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    return _receive(connection, length)


def _receive(connection: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
