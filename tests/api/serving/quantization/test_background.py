"""Which students are quantized in the background, and what follows."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

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
from services.api.serving.rollout.promotion_watcher import PromotionWatcher
from services.api.serving.settings import EngineChoice, ServingSettings
from services.shared.jobs.gates import Int8Gate
from tests.api.serving.fakes import CountingEngine, make_student

SETTINGS = ServingSettings(prepare_int8_from_bytes=100)


def write_record(promotion: Promotion, *, passed: bool) -> None:
    """Write what quantization leaves in an artifact."""
    weights = int8_weights_path(promotion.directory)
    weights.parent.mkdir()
    weights.write_bytes(b"")
    record = QuantizationRecord(
        manifest_sha256=manifest_sha256_of(promotion.directory),
        weights_sha256="",
        largest_activation=127,
        calibration_texts=1,
        heads={},
        passed=passed,
    )
    write_quantization_record(promotion.directory, record)


@pytest.fixture
def promotion(tmp_path: Path) -> Promotion:
    """A student of fifty weights and an empty dataset."""
    artifact, dataset = tmp_path / "artifact", tmp_path / "dataset"
    artifact.mkdir()
    dataset.mkdir()
    save_file({"weight": torch.zeros(50)}, artifact / "model.safetensors")
    (artifact / "manifest.json").write_text("{}")
    return Promotion("prm_1", "default", "mdl_1", "m", "mdl_1", artifact, dataset)


def test_a_large_student_with_held_out_texts_is_quantized(promotion: Promotion) -> None:
    assert should_quantize(promotion, SETTINGS)


@pytest.mark.parametrize(
    "change",
    [
        {"prepare_int8_from_bytes": 1000},
        {"engine": EngineChoice.PACKED},
        {"device": "cuda"},
    ],
    ids=str,
)
def test_a_student_that_could_not_serve_or_gain_is_not_quantized(
    promotion: Promotion, change: dict[str, object]
) -> None:
    assert not should_quantize(promotion, SETTINGS.model_copy(update=change))


def test_a_student_without_its_dataset_is_not_quantized(promotion: Promotion) -> None:
    assert promotion.dataset_dir is not None
    promotion.dataset_dir.rmdir()
    assert not should_quantize(promotion, SETTINGS)


def test_a_student_is_quantized_once_per_export(promotion: Promotion) -> None:
    write_record(promotion, passed=False)
    assert read_quantization_record(promotion.directory) is not None
    assert not should_quantize(promotion, SETTINGS)
    (promotion.directory / "manifest.json").write_text('{"again": true}')
    assert should_quantize(promotion, SETTINGS)


@pytest.mark.parametrize("passed", [True, False])
def test_a_result_is_notified_whether_it_passed_or_not(
    promotion: Promotion, tmp_path: Path, passed: bool
) -> None:
    write_record(promotion, passed=passed)
    prepared = int8_weights_path(promotion.directory).parent
    prepared.rename(tmp_path / "report")
    script = tmp_path / "prepare"
    script.write_text(f'#!/bin/sh\nmv "{tmp_path}/report/"* "$3/prepared"\n')
    script.chmod(0o755)
    assert quantize_all(promotion, python=str(script)) == [promotion]


def test_a_quantization_without_a_result_is_not_notified(promotion: Promotion) -> None:
    assert quantize_all(promotion, python="true") == []


@pytest.mark.parametrize(("code", "event"), [(1, "quantization_failed"), (3, "student_quantized")])
def test_a_failure_is_told_apart_from_a_student_that_does_not_pass(
    promotion: Promotion, tmp_path: Path, code: int, event: str
) -> None:
    script = tmp_path / "prepare"
    script.write_text(f"#!/bin/sh\nexit {code}\n")
    script.chmod(0o755)
    with capture_logs() as logs:
        assert quantize_all(promotion, python=str(script)) == []
    assert [entry["event"] for entry in logs] == [event]


@pytest.mark.parametrize(
    ("kind", "submitted"),
    [("packed-float32", True), ("packed-bfloat16", True), ("transformers-float32", False)],
)
def test_only_a_student_that_the_packed_engine_runs_is_quantized_after_its_promotion(
    promotion: Promotion, monkeypatch: pytest.MonkeyPatch, kind: str, submitted: bool
) -> None:
    found: list[Promotion] = []
    monkeypatch.setattr(BackgroundQuantizer, "submit", lambda _, given: found.append(given))
    predictor = Predictor(SETTINGS, promotions=list)
    engine = CountingEngine()
    engine.kind = kind
    predictor.active_models.swap(promotion.alias, make_student(engine))
    predictor.on_swapped(promotion)
    assert found == ([promotion] if submitted else [])


def quantize_all(promotion: Promotion, *, python: str) -> list[Promotion]:
    notified: list[Promotion] = []
    quantizer = BackgroundQuantizer(SETTINGS, on_quantized=notified.append, python=python)
    quantizer.start()
    quantizer.submit(promotion)
    quantizer.finish(timeout_seconds=60)
    assert not quantizer.is_running
    return notified


@pytest.mark.parametrize("passed", [True, False])
def test_the_gate_is_reported_and_only_a_student_that_passed_is_reloaded(
    promotion: Promotion, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates: list[tuple[str, Int8Gate]] = []
    reloaded: list[str] = []

    class Listener(NullListener):
        def on_int8_gate(self, promotion: Promotion, gate: Int8Gate) -> None:
            gates.append((promotion.model_id, gate))

    predictor = Predictor(SETTINGS, promotions=list, listener=Listener())
    monkeypatch.setattr(PromotionWatcher, "reload", lambda _, model_id: reloaded.append(model_id))
    predictor.on_quantized(promotion)
    assert (gates, reloaded) == ([], [])  # there is no record
    write_record(promotion, passed=passed)
    predictor.on_quantized(promotion)
    assert gates == [("mdl_1", Int8Gate(passed=passed, calibration_texts=1, heads={}))]
    assert reloaded == (["mdl_1"] if passed else [])


def test_a_process_that_cannot_start_does_not_kill_the_thread(promotion: Promotion) -> None:
    quantizer = BackgroundQuantizer(SETTINGS, on_quantized=lambda _: None, python="/no/such/python")
    quantizer.start()
    quantizer.submit(promotion)
    quantizer.stop(timeout_seconds=30)
    assert not quantizer.is_running


def test_stopping_terminates_a_quantization_in_progress(
    promotion: Promotion, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\ntouch $3/started\nexec sleep 600\n")
    slow.chmod(0o755)
    quantizer = BackgroundQuantizer(SETTINGS, on_quantized=lambda _: None, python=str(slow))
    quantizer.start()
    quantizer.submit(promotion)
    wait_for(promotion.directory / "started")
    quantizer.stop(timeout_seconds=30)
    assert not quantizer.is_running


def test_one_of_two_processes_quantizes_and_both_are_notified(
    promotion: Promotion, tmp_path: Path
) -> None:
    write_record(promotion, passed=True)
    int8_weights_path(promotion.directory).parent.rename(tmp_path / "report")
    go_on = tmp_path / "go-on"
    script = tmp_path / "prepare"
    script.write_text(
        "#!/bin/sh\n"
        f'echo run >> "{tmp_path}/runs"\n'
        f'while [ ! -e "{go_on}" ]; do sleep 0.01; done\n'
        f'mv "{tmp_path}/report/"* "$3/prepared"\n'
    )
    script.chmod(0o755)
    notified: list[Promotion] = []
    quantizers = [
        BackgroundQuantizer(
            SETTINGS, on_quantized=notified.append, python=str(script), retry_seconds=0.01
        )
        for _ in range(2)
    ]
    for quantizer in quantizers:
        quantizer.start()
        quantizer.submit(promotion)
    wait_for(tmp_path / "runs")
    time.sleep(0.2)  # meanwhile the other one tries in vain
    assert notified == []
    go_on.touch()
    for quantizer in quantizers:
        quantizer.finish(timeout_seconds=60)
        assert not quantizer.is_running
    assert notified == [promotion, promotion]
    assert (tmp_path / "runs").read_text() == "run\n"


def test_it_waits_until_memory_is_available(
    promotion: Promotion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = bytes_to_quantize(promotion.directory, SETTINGS) - 1
    checked = threading.Semaphore(0)

    def available() -> int:
        checked.release()
        return free

    monkeypatch.setattr("services.api.serving.quantization.background.available_bytes", available)
    script = tmp_path / "prepare"
    script.write_text(f'#!/bin/sh\ntouch "{tmp_path}/ran"\n')
    script.chmod(0o755)
    quantizer = BackgroundQuantizer(
        SETTINGS, on_quantized=lambda _: None, python=str(script), retry_seconds=0.01
    )
    quantizer.start()
    quantizer.submit(promotion)
    for _ in range(3):
        assert checked.acquire(timeout=30)
    assert not (tmp_path / "ran").exists()
    free += 1
    wait_for(tmp_path / "ran")
    quantizer.stop(timeout_seconds=30)
    assert not quantizer.is_running


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.01)
