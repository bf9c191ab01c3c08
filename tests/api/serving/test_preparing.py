"""Which students are prepared for 8-bit serving, and what follows."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.api.serving.gate import prepared_weights, read_prepared
from services.api.serving.preparing import Preparer, is_worth_preparing
from services.api.serving.promoted import Promoted
from services.api.serving.settings import EngineChoice, ServingSettings

SETTINGS = ServingSettings(prepare_int8_from_bytes=100)


@pytest.fixture
def promoted(tmp_path: Path) -> Promoted:
    """A student of two hundred bytes and an empty dataset."""
    artifact, dataset = tmp_path / "artifact", tmp_path / "dataset"
    artifact.mkdir()
    dataset.mkdir()
    (artifact / "model.safetensors").write_bytes(b"x" * 200)
    (artifact / "manifest.json").write_text("{}")
    return Promoted("prm_1", "default", "mdl_1", "m", "mdl_1", artifact, dataset)


def test_a_large_student_with_held_out_texts_is_worth_it(promoted: Promoted) -> None:
    assert is_worth_preparing(promoted, SETTINGS)


@pytest.mark.parametrize(
    "change",
    [
        {"prepare_int8_from_bytes": 201},
        {"engine": EngineChoice.PACKED},
        {"device": "cuda"},
    ],
    ids=str,
)
def test_it_is_not_worth_it_where_it_could_not_serve_or_gain(
    promoted: Promoted, change: dict[str, Any]
) -> None:
    assert not is_worth_preparing(promoted, SETTINGS.model_copy(update=change))


def test_it_cannot_be_compared_without_its_dataset(promoted: Promoted) -> None:
    assert promoted.dataset_dir is not None
    promoted.dataset_dir.rmdir()
    assert not is_worth_preparing(promoted, SETTINGS)


def test_what_was_tried_is_not_tried_again_unless_exported_anew(promoted: Promoted) -> None:
    weights = prepared_weights(promoted.directory)
    weights.parent.mkdir()
    weights.write_bytes(b"")
    manifest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # of "{}"
    report = {"manifest_sha256": manifest, "weights_sha256": "", "calibration_texts": 1}
    report |= {"heads": {}, "passed": False}
    weights.with_suffix(".json").write_text(json.dumps(report))
    assert read_prepared(promoted.directory) is not None
    assert not is_worth_preparing(promoted, SETTINGS)
    (promoted.directory / "manifest.json").write_text('{"again": true}')
    assert is_worth_preparing(promoted, SETTINGS)


@pytest.mark.parametrize(("python", "told"), [("true", ["mdl_1"]), ("false", [])])
def test_only_what_passed_is_told(promoted: Promoted, python: str, told: list[str]) -> None:
    passed: list[str] = []
    preparer = Preparer(SETTINGS, on_passed=passed.append, python=python)
    preparer.start()
    preparer.consider(promoted)
    preparer.consider(promoted)  # the first left no trace, so it is tried again
    preparer._queue.put(None)
    preparer._thread.join(60)
    assert not preparer._thread.is_alive()
    assert passed == told * 2


def test_a_preparation_that_cannot_start_is_survived(promoted: Promoted) -> None:
    preparer = Preparer(SETTINGS, on_passed=lambda _: None, python="/no/such/python")
    preparer.start()
    preparer.consider(promoted)
    preparer.stop(timeout_seconds=30)
    assert not preparer._thread.is_alive()


def test_stopping_ends_a_preparation_under_way(promoted: Promoted, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\ntouch $3/started\nexec sleep 600\n")
    slow.chmod(0o755)
    preparer = Preparer(SETTINGS, on_passed=lambda _: None, python=str(slow))
    preparer.start()
    preparer.consider(promoted)
    while not (promoted.directory / "started").exists():
        os.sched_yield()
    preparer.stop(timeout_seconds=30)
    assert not preparer._thread.is_alive()
