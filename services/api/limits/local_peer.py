"""Whose process is at the other end of a connection over loopback, from the kernel's table of sockets.

TCP has no SO_PEERCRED; /proc/net/tcp names the owner of every socket of this network namespace (proc(5)).
"""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path

Address = tuple[str, int]

_TABLES = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}
_WORD_BYTES = 4  # addresses are printed in words of the machine's byte order


def is_own(client: Address, server: Address, *, tables: dict[int, Path] | None = None) -> bool:
    """Return whether this user, or root, owns the client's end of a connection between two addresses.

    A socket whose process has closed it belongs to nobody: the kernel prints user 0 and inode 0. Returns
    True where there is no such table, as on systems other than Linux.
    """
    version = ipaddress.ip_address(client[0]).version
    table = (tables or _TABLES)[version]
    try:
        rows = table.read_text().splitlines()[1:]
    except OSError:
        return not table.exists()
    ends = [_printed(client), _printed(server)]
    for row in rows:
        columns = row.split()
        if columns[1:3] == ends:
            uid, inode = int(columns[7]), int(columns[9])
            return inode != 0 and uid in (0, os.getuid())
    return False


def _printed(address: Address) -> str:
    """Return an address as the table prints it: 0100007F:1F40 is 127.0.0.1:8000 on x86."""
    packed = ipaddress.ip_address(address[0]).packed
    words = [packed[i : i + _WORD_BYTES] for i in range(0, len(packed), _WORD_BYTES)]
    host = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{host}:{address[1]:04X}"
