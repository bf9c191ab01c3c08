"""Atomic writes leave either the old file or the whole new one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.shared.files.atomic_write import (
    atomic_write,
    partial_path,
    shared_partial_path,
    write_text,
)


def test_a_written_file_replaces_the_old_one_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "card.json"
    write_text(path, "first")
    write_text(path, "second")
    assert path.read_text() == "second"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    write_text(path, "old")

    def interrupted_write() -> None:
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_the_file_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    with atomic_write(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"


def test_temporary_names_are_hidden_and_recognisable(tmp_path: Path) -> None:
    final = tmp_path / "export"
    assert shared_partial_path(final).name == ".export.partial"
    assert partial_path(final).name == f".export.{os.getpid()}.partial"
