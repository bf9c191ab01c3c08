"""The end of a log, by bytes and by whole lines."""

from __future__ import annotations

from pathlib import Path

from services.shared.files.tail import read_last_lines, read_tail


def test_a_short_file_is_returned_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\n")
    assert read_tail(log, max_bytes=100) == "one\ntwo\n"
    assert read_last_lines(log, max_bytes=100) == "one\ntwo\n"


def test_a_long_file_is_cut_at_a_byte_or_at_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\nthree\n")
    assert read_tail(log, max_bytes=8) == "o\nthree\n"
    assert read_last_lines(log, max_bytes=8) == "three\n"


def test_a_character_cut_in_two_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("量\n", encoding="utf-8")
    assert read_tail(log, max_bytes=3).endswith("\ufffd\n")


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_tail(tmp_path / "log", max_bytes=8) == ""
    assert read_last_lines(tmp_path / "log", max_bytes=8) == ""
