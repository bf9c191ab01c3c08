"""Acquiring, swapping and closing models."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.api.serving.active_models import ActiveModels
from services.api.serving.errors import NoActiveModel
from tests.api.serving.fakes import CountingEngine, make_student


def test_a_swap_replaces_the_model_and_closes_the_previous_one() -> None:
    active_models, engines = ActiveModels(), (CountingEngine(), CountingEngine())
    first, second = (make_student(engine) for engine in engines)
    active_models.swap("default", first)
    active_models.swap("default", second)
    assert active_models.get() is second
    assert first.closed.wait(20)
    assert [engine.is_closed for engine in engines] == [True, False]


def test_a_retired_model_closes_when_its_last_reference_is_released() -> None:
    active_models, engine = ActiveModels(), CountingEngine()
    first = make_student(engine)
    active_models.swap("default", first)
    active_models.lease()
    active_models.lease()
    active_models.swap("default", None)
    first.release()
    assert not engine.is_closed
    first.release()
    assert first.closed.wait(20)
    assert not first.acquire()


def test_a_model_that_serves_another_alias_stays_open() -> None:
    active_models, engine = ActiveModels(), CountingEngine()
    shared = make_student(engine)
    active_models.swap("default", shared)
    active_models.swap("challenger", shared)
    active_models.swap("challenger", None)
    assert active_models.get() is shared
    active_models.lease()
    shared.release()
    assert not engine.is_closed


def test_an_alias_without_a_model_cannot_be_leased() -> None:
    active_models = ActiveModels()
    assert active_models.get() is None
    with pytest.raises(NoActiveModel):
        active_models.lease()


def test_closing_a_model_completes_even_at_exit() -> None:
    # A daemon thread that is torn down inside torch aborts the process.
    script = (
        "import time\n"
        "from services.api.serving.active_models import ActiveModel, ActiveModels\n"
        "class SlowEngine:\n"
        "    def close(self):\n"
        "        time.sleep(0.3)\n"
        "        print('engine has closed', flush=True)\n"
        "active_models = ActiveModels()\n"
        "active_models.swap('default', ActiveModel('n', 'v', 'm', [], 8, None, SlowEngine()))\n"
        "active_models.swap('default', None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert "engine has closed" in done.stdout
