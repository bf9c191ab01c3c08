"""The password of Redis in compose.yaml is in no list of processes; no engine is needed."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

COMPOSE = (Path(__file__).resolve().parents[2] / "compose.yaml").read_text("utf-8")


def test_redis_reads_its_password_from_standard_input(tmp_path: Path) -> None:
    # In place of the image's entrypoint, one that shows its arguments and its input.
    entrypoint = tmp_path / "docker-entrypoint.sh"
    entrypoint.write_text('#!/bin/sh\necho "$@"; cat\n')
    entrypoint.chmod(0o755)
    found = re.search(r"- sh\n +- -c\n +- \|\n((?: {8}.*\n)+)", COMPOSE)
    assert found
    script = textwrap.dedent(found[1]).replace("$$", "$")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REDISCLI_AUTH": "planted"}
    shown = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=True, env=env
    )
    arguments, given = shown.stdout.splitlines()
    assert given == "requirepass planted"
    assert arguments.startswith("redis-server - --appendonly yes ")
    assert "planted" not in arguments


def test_no_command_names_a_password() -> None:
    lines = [line for line in COMPOSE.splitlines() if re.search(r"^ +(command|test): ", line)]
    assert len(lines) >= 3
    assert not [line for line in lines if "PASSWORD" in line]
