"""Which students are prepared for 8-bit serving, and what follows."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.api.serving.memory_headroom import bytes_to_quantize
from services.api.serving.predictor import Predictor
from services.api.serving.promotion import NullListener, Promotion
from services.api.serving.quantization.background import BackgroundQuantizer, should_quantize
from services.api.serving.quantization.record import (
    QuantizationRecord,
    int8_weights_path,
    manifest_sha256_of,
    read_quantization_record,
    write_quantization_record,
)
from services.api.serving.settings import EngineChoice, ServingSettings
from services.shared.jobs.gates import Int8Gate

SETTINGS = ServingSettings(prepare_int8_from_bytes=100)


def leave_report(promoted: Promotion, *, passed: bool) -> None:
    """Write what a preparation leaves beside its artifact."""
    weights = int8_weights_path(promoted.directory)
    weights.parent.mkdir()
    weights.write_bytes(b"")
    report = QuantizationRecord(
        manifest_sha256=manifest_sha256_of(promoted.directory),
        weights_sha256="",
        largest_activation=127,
        calibration_texts=1,
        heads={},
        passed=passed,
    )
    write_quantization_record(promoted.directory, report)


@pytest.fixture
def promoted(tmp_path: Path) -> Promotion:
    """A student of fifty weights and an empty dataset."""
    artifact, dataset = tmp_path / "artifact", tmp_path / "dataset"
    artifact.mkdir()
    dataset.mkdir()
    save_file({"weight": torch.zeros(50)}, artifact / "model.safetensors")
    (artifact / "manifest.json").write_text("{}")
    return Promotion("prm_1", "default", "mdl_1", "m", "mdl_1", artifact, dataset)


def test_a_large_student_with_held_out_texts_is_worth_it(promoted: Promotion) -> None:
    assert should_quantize(promoted, SETTINGS)


@pytest.mark.parametrize(
    "change",
    [
        {"prepare_int8_from_bytes": 1000},
        {"engine": EngineChoice.PACKED},
        {"device": "cuda"},
    ],
    ids=str,
)
def test_it_is_not_worth_it_where_it_could_not_serve_or_gain(
    promoted: Promotion, change: dict[str, Any]
) -> None:
    assert not should_quantize(promoted, SETTINGS.model_copy(update=change))


def test_it_cannot_be_compared_without_its_dataset(promoted: Promotion) -> None:
    assert promoted.dataset_dir is not None
    promoted.dataset_dir.rmdir()
    assert not should_quantize(promoted, SETTINGS)


def test_what_was_tried_is_not_tried_again_unless_exported_anew(promoted: Promotion) -> None:
    leave_report(promoted, passed=False)
    assert read_quantization_record(promoted.directory) is not None
    assert not should_quantize(promoted, SETTINGS)
    (promoted.directory / "manifest.json").write_text('{"again": true}')
    assert should_quantize(promoted, SETTINGS)


@pytest.mark.parametrize("passed", [True, False])
def test_what_was_prepared_is_told_whether_it_passed_or_not(
    promoted: Promotion, tmp_path: Path, passed: bool
) -> None:
    leave_report(promoted, passed=passed)
    prepared = int8_weights_path(promoted.directory).parent
    prepared.rename(tmp_path / "report")
    script = tmp_path / "prepare"
    script.write_text(f'#!/bin/sh\nmv "{tmp_path}/report/"* "$3/prepared"\n')
    script.chmod(0o755)
    assert work_off(promoted, python=str(script)) == [promoted]


def test_a_preparation_that_leaves_nothing_is_not_told(promoted: Promotion) -> None:
    assert work_off(promoted, python="true") == []


def work_off(promoted: Promotion, *, python: str) -> list[Promotion]:
    told: list[Promotion] = []
    preparer = BackgroundQuantizer(SETTINGS, on_quantized=told.append, python=python)
    preparer.start()
    preparer.submit(promoted)
    preparer._queue.put(None)
    preparer._thread.join(60)
    assert not preparer._thread.is_alive()
    return told


@pytest.mark.parametrize("passed", [True, False])
def test_the_gate_is_reported_and_only_what_passed_is_loaded_again(
    promoted: Promotion, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates: list[tuple[str, Int8Gate]] = []
    loaded: list[str] = []

    class Listener(NullListener):
        def on_int8_gate(self, promoted: Promotion, gate: Int8Gate) -> None:
            gates.append((promoted.model_id, gate))

    predictor = Predictor(SETTINGS, promotions=list, listener=Listener())
    monkeypatch.setattr(predictor._watcher, "reload", loaded.append)
    predictor._handle_quantized(promoted)
    assert (gates, loaded) == ([], [])  # nothing was left beside the artifact
    leave_report(promoted, passed=passed)
    predictor._handle_quantized(promoted)
    assert gates == [("mdl_1", Int8Gate(passed=passed, calibration_texts=1, heads={}))]
    assert loaded == (["mdl_1"] if passed else [])


def test_a_preparation_that_cannot_start_is_survived(promoted: Promotion) -> None:
    preparer = BackgroundQuantizer(SETTINGS, on_quantized=lambda _: None, python="/no/such/python")
    preparer.start()
    preparer.submit(promoted)
    preparer.stop(timeout_seconds=30)
    assert not preparer._thread.is_alive()


def test_stopping_ends_a_preparation_under_way(promoted: Promotion, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\ntouch $3/started\nexec sleep 600\n")
    slow.chmod(0o755)
    preparer = BackgroundQuantizer(SETTINGS, on_quantized=lambda _: None, python=str(slow))
    preparer.start()
    preparer.submit(promoted)
    wait_for(promoted.directory / "started")
    preparer.stop(timeout_seconds=30)
    assert not preparer._thread.is_alive()


def test_of_two_processes_one_prepares_and_both_are_told(
    promoted: Promotion, tmp_path: Path
) -> None:
    leave_report(promoted, passed=True)
    int8_weights_path(promoted.directory).parent.rename(tmp_path / "report")
    go_on = tmp_path / "go-on"
    script = tmp_path / "prepare"
    script.write_text(
        "#!/bin/sh\n"
        f'echo run >> "{tmp_path}/runs"\n'
        f'while [ ! -e "{go_on}" ]; do sleep 0.01; done\n'
        f'mv "{tmp_path}/report/"* "$3/prepared"\n'
    )
    script.chmod(0o755)
    told: list[Promotion] = []
    preparers = [
        BackgroundQuantizer(
            SETTINGS, on_quantized=told.append, python=str(script), retry_seconds=0.01
        )
        for _ in range(2)
    ]
    for preparer in preparers:
        preparer.start()
        preparer.submit(promoted)
    wait_for(tmp_path / "runs")
    time.sleep(0.2)  # the other one tries in vain meanwhile
    assert told == []
    go_on.touch()
    for preparer in preparers:
        preparer._queue.put(None)
        preparer._thread.join(60)
    assert told == [promoted, promoted]
    assert (tmp_path / "runs").read_text() == "run\n"


def test_it_waits_until_memory_is_there(
    promoted: Promotion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = bytes_to_quantize(promoted.directory, SETTINGS) - 1
    asked = threading.Semaphore(0)

    def available() -> int:
        asked.release()
        return free

    monkeypatch.setattr("services.api.serving.quantization.background.available_bytes", available)
    script = tmp_path / "prepare"
    script.write_text(f'#!/bin/sh\ntouch "{tmp_path}/ran"\n')
    script.chmod(0o755)
    preparer = BackgroundQuantizer(
        SETTINGS, on_quantized=lambda _: None, python=str(script), retry_seconds=0.01
    )
    preparer.start()
    preparer.submit(promoted)
    for _ in range(3):
        assert asked.acquire(timeout=30)
    assert not (tmp_path / "ran").exists()
    free += 1
    wait_for(tmp_path / "ran")
    preparer.stop(timeout_seconds=30)
    assert not preparer._thread.is_alive()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)
