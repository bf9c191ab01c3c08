"""Holding, swapping and closing students."""

import subprocess
import sys
from typing import Any

import pytest

from services.api.serving.active_models import ActiveModels
from services.api.serving.errors import NoActiveModel


def test_a_swap_replaces_the_student_and_closes_the_former_one(new_student: Any) -> None:
    active_models, first, second = (
        ActiveModels(),
        new_student(version="v1"),
        new_student(version="v2"),
    )
    active_models.swap("default", first)
    active_models.swap("default", second)
    assert active_models.get() is second
    assert first.closed.wait(20)
    assert first.engine.is_closed
    assert not second.engine.is_closed


def test_a_held_student_closes_when_the_last_holder_lets_go(new_student: Any) -> None:
    active_models, first = ActiveModels(), new_student()
    active_models.swap("default", first)
    active_models.lease()
    active_models.lease()
    active_models.swap("default", None)
    first.release()
    assert not first.engine.is_closed
    first.release()
    assert first.closed.wait(20)
    assert not first.acquire()


def test_a_student_that_serves_another_alias_stays_open(new_student: Any) -> None:
    active_models, shared = ActiveModels(), new_student()
    active_models.swap("default", shared)
    active_models.swap("challenger", shared)
    active_models.swap("challenger", None)
    assert active_models.get() is shared
    active_models.lease()
    shared.release()
    assert not shared.engine.is_closed


def test_an_empty_alias_has_no_student_to_lease() -> None:
    active_models = ActiveModels()
    assert active_models.get() is None
    with pytest.raises(NoActiveModel):
        active_models.lease()


def test_a_student_is_let_go_whole_even_as_the_process_ends() -> None:
    # A daemon thread that is torn down inside torch aborts the process.
    script = (
        "import time\n"
        "from services.api.serving.active_models import ActiveModel, ActiveModels\n"
        "class Slow:\n"
        "    def close(self):\n"
        "        time.sleep(0.3)\n"
        "        print('let go', flush=True)\n"
        "active_models = ActiveModels()\n"
        "active_models.swap('default', ActiveModel('n', 'v', 'm', [], 8, None, Slow()))\n"
        "active_models.swap('default', None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert "let go" in done.stdout
