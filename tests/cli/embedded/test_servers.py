import os
import signal
from pathlib import Path

import psycopg
import pytest
import redis

from services.cli.embedded.servers import StartFailed, socket_dir, start_postgres, start_valkey


def _dsn(url: str) -> str:
    return url.replace("+psycopg", "")


def test_postgres_keeps_its_rows_over_a_restart(tmp_path: Path) -> None:
    first = start_postgres(tmp_path, durable=False)
    with psycopg.connect(_dsn(first.url)) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
    first.stop()
    second = start_postgres(tmp_path, durable=False)
    with psycopg.connect(_dsn(second.url)) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (7,)
    second.stop()


def test_postgres_starts_despite_a_pid_file_whose_pid_another_process_has_taken(
    tmp_path: Path,
) -> None:
    start_postgres(tmp_path, durable=False).stop()
    (tmp_path / "postgres" / "postmaster.pid").write_text(f"{os.getpid()}\n")
    server = start_postgres(tmp_path, durable=False)
    assert server.process.poll() is None
    server.stop()


def test_postgres_leaves_no_pid_file_behind_after_a_stop(tmp_path: Path) -> None:
    server = start_postgres(tmp_path, durable=False)
    server.stop()
    assert server.process.returncode == 0
    assert not (tmp_path / "postgres" / "postmaster.pid").exists()


def test_a_broken_cluster_is_reported_with_the_message_of_postgres(tmp_path: Path) -> None:
    start_postgres(tmp_path, durable=False).stop()
    (tmp_path / "postgres" / "PG_VERSION").write_text("11\n")
    with pytest.raises(StartFailed, match="initialized by PostgreSQL version 11"):
        start_postgres(tmp_path, durable=False)


def test_valkey_keeps_its_messages_when_it_is_killed(tmp_path: Path) -> None:
    first = start_valkey(tmp_path)
    socket = first.url.removeprefix("redis+socket://")
    with redis.Redis(unix_socket_path=socket) as client:
        client.lpush("trainer", "a message")
        client.execute_command("WAITAOF", 1, 0, 0)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    second = start_valkey(tmp_path)
    with redis.Redis(unix_socket_path=socket) as client:
        assert client.lrange("trainer", 0, -1) == [b"a message"]
    second.stop()


def test_a_data_directory_with_a_long_path_uses_a_short_private_socket_directory(
    tmp_path: Path,
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    sockets = socket_dir(deep)
    assert len(str(sockets)) <= 80
    assert sockets.stat().st_mode & 0o777 == 0o700
    assert sockets == socket_dir(deep) != socket_dir(tmp_path)
