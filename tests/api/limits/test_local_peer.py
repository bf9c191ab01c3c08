"""Without keys, a server on loopback answers its own user and root, and no other user of the machine."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.api.auth.keys import Keys, KeysFile
from services.api.limits.local_peer import is_own
from tests.api.harness import Platform
from tests.api.limits.test_connections import serve

CLIENT, SERVER = ("127.0.0.1", 40000), ("127.0.0.1", 8000)
ROW = " 0: 0100007F:9C40 0100007F:1F40 01 0:0 00:0 0 {uid} 0 {inode} 1\n"
LIVEZ = "GET /livez HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nConnection: close\\r\\n\\r\\n"


@pytest.mark.parametrize(
    ("uid", "inode", "own"),
    [(os.getuid(), 7, True), (0, 7, True), (4711, 7, False), (0, 0, False), (None, 7, False)],
    ids=["own", "root", "another", "closed", "absent"],
)
@pytest.mark.skipif(sys.byteorder != "little", reason="the row is that of a little-endian machine")
def test_the_owner_of_a_connection_is_read_from_the_kernels_table(
    tmp_path: Path, uid: int | None, inode: int, own: bool
) -> None:
    table = tmp_path / "tcp"
    table.write_text("header\n" + ("" if uid is None else ROW.format(uid=uid, inode=inode)))
    assert is_own(CLIENT, SERVER, tables={4: table}) is own


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_of_this_process_is_its_own(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"{host} is not configured here")
    with listener, socket.create_connection(listener.getsockname()[:2]) as client:
        ends = client.getsockname()[:2], listener.getsockname()[:2]
        assert is_own(*ends)
        assert not is_own((host, 1), ends[1])


def _status_as(user: str, address: tuple[str, int]) -> str:
    entry = pwd.getpwnam(user)
    script = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 20)\n"
        f"s.sendall(b'{LIVEZ}')\n"
        "print(s.recv(64).split()[1].decode())"
    )
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-I", "-S", "-c", script, str(address[1])],
        user=entry.pw_uid,
        group=entry.pw_gid,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_local_user_is_refused_unless_any_may_or_there_are_keys(offline: Platform) -> None:
    with serve(offline) as address:
        assert _status_as("nobody", address) == "403"
        assert _status_as("root", address) == "200"
    with serve(offline, local_users="any") as address:
        assert _status_as("nobody", address) == "200"
    offline.keys = Keys(KeysFile.validate_python({"a": {"sha256": "0" * 64, "scopes": ["read"]}}))
    with serve(offline, local_users="own") as address:
        assert _status_as("nobody", address) == "200"
