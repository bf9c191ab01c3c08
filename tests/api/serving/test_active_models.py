"""Holding, swapping and closing students."""

import subprocess
import sys
from typing import Any

import pytest

from services.api.serving.active_models import Slot
from services.api.serving.errors import NoStudent


def test_a_swap_replaces_the_student_and_closes_the_former_one(new_student: Any) -> None:
    slot, first, second = Slot(), new_student(version="v1"), new_student(version="v2")
    slot.swap("default", first)
    slot.swap("default", second)
    assert slot.active() is second
    assert first.closed.wait(20)
    assert first.engine.is_closed
    assert not second.engine.is_closed


def test_a_held_student_closes_when_the_last_holder_lets_go(new_student: Any) -> None:
    slot, first = Slot(), new_student()
    slot.swap("default", first)
    slot.lease()
    slot.lease()
    slot.swap("default", None)
    first.release()
    assert not first.engine.is_closed
    first.release()
    assert first.closed.wait(20)
    assert not first.hold()


def test_a_student_that_serves_another_alias_stays_open(new_student: Any) -> None:
    slot, shared = Slot(), new_student()
    slot.swap("default", shared)
    slot.swap("challenger", shared)
    slot.swap("challenger", None)
    assert slot.active() is shared
    slot.lease()
    shared.release()
    assert not shared.engine.is_closed


def test_an_empty_alias_has_no_student_to_lease() -> None:
    slot = Slot()
    assert slot.active() is None
    with pytest.raises(NoStudent):
        slot.lease()


def test_a_student_is_let_go_whole_even_as_the_process_ends() -> None:
    # A daemon thread that is torn down inside torch aborts the process.
    script = (
        "import time\n"
        "from services.api.serving.active_models import ActiveStudent, Slot\n"
        "class Slow:\n"
        "    def close(self):\n"
        "        time.sleep(0.3)\n"
        "        print('let go', flush=True)\n"
        "slot = Slot()\n"
        "slot.swap('default', ActiveStudent('n', 'v', 'm', [], 8, None, Slow()))\n"
        "slot.swap('default', None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert "let go" in done.stdout
