"""Ids sort by time of making and say what they name."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.shared.jobs.ids import model_id_of, new_id


def test_an_id_is_its_prefix_and_26_characters() -> None:
    assert re.fullmatch(r"job_[0-9a-hjkmnp-tv-z]{26}", new_id("job"))


def test_ids_of_one_process_sort_in_order_of_making() -> None:
    made = [new_id("job") for _ in range(5000)]
    assert made == sorted(set(made))


def test_ids_made_by_many_threads_differ() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = [
            id
            for ids in pool.map(lambda _: [new_id("ds") for _ in range(500)], range(8))
            for id in ids
        ]
    assert len(set(made)) == 4000


def test_ids_increase_when_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = new_id("job")
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000)
    assert new_id("job") > before


def test_each_attempt_has_a_model_id_of_its_own() -> None:
    job_id = new_id("job")
    assert model_id_of(job_id, 1) == f"mdl_{job_id[4:]}_1"
    assert model_id_of(job_id, 1) != model_id_of(job_id, 2)
