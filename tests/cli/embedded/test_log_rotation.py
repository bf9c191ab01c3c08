"""Logs of the embedded platform stay bounded while their components keep writing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.cli.embedded.log_rotation import rotate


def test_a_log_within_its_bound_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    log.write_text("x" * 100)
    assert not rotate(log, max_bytes=100)
    assert not rotate(tmp_path / "none.log", max_bytes=100)
    assert log.read_text() == "x" * 100


def test_a_component_that_keeps_writing_goes_on_at_the_new_end(tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    code = "import sys; [print(line, end='', flush=True) for line in sys.stdin]"
    with log.open("ab") as output:
        writer = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=output, text=True, bufsize=1
        )
    assert writer.stdin is not None
    with writer:
        writer.stdin.write("before\n" * 100)
        while log.stat().st_size < 700:
            assert writer.poll() is None
        assert rotate(log, max_bytes=100)
        writer.stdin.write("after\n")
    assert log.read_text() == "after\n"
    assert log.with_name("api.log.1").read_text() == "before\n" * 100


def test_only_one_former_log_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    for text in ("first", "second"):
        log.write_text(text)
        assert rotate(log, max_bytes=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api.log", "api.log.1"]
    assert log.with_name("api.log.1").read_text() == "second"
