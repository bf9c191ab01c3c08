"""`make env`: what it detects on a machine, and which values it keeps."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from docker import write_env
from services.api.auth.keys import read_keys


def touch(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def test_a_machine_without_devices_needs_no_overlay(tmp_path: Path) -> None:
    assert write_env.devices(tmp_path) == {}


def test_a_hygon_machine_gets_its_overlay(tmp_path: Path) -> None:
    touch(tmp_path, "dev/kfd", "dev/mkfd", "dev/dri/renderD128", "dev/dri/renderD129")
    (tmp_path / "opt/hyhal").mkdir(parents=True)
    found = write_env.devices(tmp_path)
    assert found["COMPOSE_FILE"] == "compose.yaml:compose.dcu.yaml"
    assert found["DCU_DEVICES"] == "0,1"
    assert found["HYHAL_PATH"] == "/opt/hyhal"
    assert found["DCU_MKFD"] == "/dev/mkfd"


def test_mkfd_is_replaced_where_the_host_has_none(tmp_path: Path) -> None:
    touch(tmp_path, "dev/kfd")
    (tmp_path / "usr/local/hyhal").mkdir(parents=True)
    found = write_env.devices(tmp_path)
    assert (found["HYHAL_PATH"], found["DCU_MKFD"]) == ("/usr/local/hyhal", "/dev/null")


def test_a_hygon_machine_without_its_driver_still_requires_it(tmp_path: Path) -> None:
    touch(tmp_path, "dev/kfd", "dev/mkfd")
    assert write_env.devices(tmp_path)["HYHAL_PATH"] == "/opt/hyhal"


def test_an_amd_machine_is_not_mistaken_for_a_hygon_one(tmp_path: Path) -> None:
    touch(tmp_path, "dev/kfd", "dev/dri/renderD128")
    found = write_env.devices(tmp_path)
    assert found["COMPOSE_FILE"] == "compose.yaml:compose.rocm.yaml"
    assert found["ROCM_DEVICES"] == "0"


def test_the_two_groups_are_different_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_env, "group", lambda root, name: "44")
    assert write_env.groups(tmp_path) == {"VIDEO_GID": "44", "RENDER_GID": "10001"}


def test_a_second_run_keeps_every_value_and_the_key(tmp_path: Path) -> None:
    write_env.main(tmp_path)
    first = (tmp_path / ".env").read_text(), (tmp_path / ".secrets/api_keys.json").read_text()
    write_env.main(tmp_path)
    assert first == (
        (tmp_path / ".env").read_text(),
        (tmp_path / ".secrets/api_keys.json").read_text(),
    )


def test_values_of_the_operator_are_kept(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("# ours\nWORKER_MEMORY=9GiB\nAPI_PORT=81")
    write_env.main(tmp_path)
    text = (tmp_path / ".env").read_text()
    assert text.startswith("# ours\nWORKER_MEMORY=9GiB\nAPI_PORT=81\n")
    assert text.count("WORKER_MEMORY=") == 1


def test_only_its_owner_can_read_the_env_file(tmp_path: Path) -> None:
    write_env.main(tmp_path)
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0


def test_the_printed_key_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_env.main(tmp_path)
    key = capsys.readouterr().out.partition("is stored): ")[2].split()[0]
    assert read_keys(tmp_path / ".secrets/api_keys.json").find(key) is not None


def test_the_key_itself_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_env.write_key(path, "sh_secret")
    assert "sh_secret" not in path.read_text()
    assert hashlib.sha256(b"sh_secret").hexdigest() in path.read_text()
