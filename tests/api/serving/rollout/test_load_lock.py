"""One process of a machine loads a student at a time; what may pass is retried."""

from __future__ import annotations

import errno
import multiprocessing
import resource
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from services.api.serving.rollout.load_lock import LoadAbandoned, one_load_at_a_time
from services.api.serving.rollout.promotion_watcher import _may_pass


def _hold(path: Path, held: Event, release: Event) -> None:
    with one_load_at_a_time(path, stopping=lambda: False):
        held.set()
        release.wait(60)


def test_a_second_process_waits_until_the_first_has_loaded(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    first = context.Process(target=_hold, args=(path, held, release))
    first.start()
    try:
        assert held.wait(60)
        polls = iter([False, True])
        with pytest.raises(LoadAbandoned), one_load_at_a_time(path, stopping=lambda: next(polls)):
            pytest.fail("two processes load at once")
    finally:
        release.set()
        first.join(60)
    with one_load_at_a_time(path, stopping=lambda: False):
        assert first.exitcode == 0


def test_a_process_that_is_killed_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    first = context.Process(target=_hold, args=(path, held, release))
    first.start()
    assert held.wait(60)
    first.kill()
    first.join(60)
    with one_load_at_a_time(path, stopping=lambda: True):
        pass


@pytest.fixture
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_load_without_file_descriptors_is_retried(tmp_path: Path, no_descriptors: None) -> None:
    with (
        pytest.raises(OSError) as raised,
        one_load_at_a_time(tmp_path / "lock", stopping=lambda: False),
    ):
        pass
    assert raised.value.errno == errno.EMFILE
    assert _may_pass(raised.value)


class SafetensorError(Exception):
    """As safetensors raises it: the system's error is text."""


def _caused_by(error: Exception) -> Exception:
    try:
        raise ImportError("cannot import torch") from error
    except ImportError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (SafetensorError("I/O error: Too many open files (os error 24)"), True),
        (_caused_by(OSError(errno.EMFILE, "Too many open files")), True),
        (MemoryError(), True),
        (SafetensorError("Error while deserializing header: InvalidHeaderLength"), False),
        (ValueError("the labels differ"), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
    ],
)
def test_what_the_machine_lacks_for_now_is_retried(error: Exception, passes: bool) -> None:
    assert _may_pass(error) is passes
