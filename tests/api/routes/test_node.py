"""What jobs may use: workers and their findings, the queue, the disk, base models, devices."""

from __future__ import annotations

import json
import time
from pathlib import Path

from services.shared.jobs.worker_reports import (
    WorkerCheck,
    WorkerReport,
    read_worker_reports,
    remove_worker_report,
    write_worker_report,
)
from services.shared.launch.worker_report import WorkerReporter
from tests.api.harness import JobDriver, Platform


def report(name: str, *, seen_at: float | None = None) -> WorkerReport:
    now = time.time()
    check = WorkerCheck(name="disk", status="failed", detail="<b>full</b>", remedy="Add space.")
    return WorkerReport(
        name=name, kind="trainer", pid=1, started_at=now, seen_at=now if seen_at is None else seen_at,
        device_kind="cpu", healthy=False, examined_at=now, checks=[check],
    )  # fmt: skip


def test_the_node_shows_running_workers_with_their_findings(platform: Platform) -> None:
    desk = JobDriver(platform)
    desk.submit()
    desk.running()
    settings = platform.settings
    write_worker_report(settings, report("trainer@here:1"))
    write_worker_report(settings, report("trainer@gone:2", seen_at=time.time() - 600))
    node = desk.client.get("/node").json()
    assert [worker["name"] for worker in node["workers"]] == ["trainer@here:1"]
    assert node["workers"][0]["checks"][0]["remedy"] == "Add space."
    counts = {(c["kind"], c["state"]): c["jobs"] for c in node["jobs"]}
    assert counts == {("teacher", "queued"): 1, ("teacher", "running"): 1}
    assert 0 < node["storage"]["used_bytes"] < node["storage"]["total_bytes"]


def test_reports_go_with_their_worker_or_after_a_day(platform: Platform) -> None:
    settings = platform.settings
    write_worker_report(settings, report("a@x:1"))
    write_worker_report(settings, report("../../evil:2", seen_at=time.time() - 90_000))
    files = settings.data_dir / "workers"
    assert sorted(p.name for p in files.iterdir()) == [".._.._evil_2.json", "a_x_1.json"]
    assert [r.name for r in read_worker_reports(settings)] == ["a@x:1"]
    assert [p.name for p in files.iterdir()] == ["a_x_1.json"]
    remove_worker_report(settings, "a@x:1")
    assert read_worker_reports(settings) == []
    (files / "broken.json").write_text("{")
    assert read_worker_reports(settings) == []


def test_a_worker_reports_itself_with_what_the_doctor_finds(platform: Platform) -> None:
    reporter = WorkerReporter(platform.settings, name="trainer@here:7", kind="trainer")
    reporter.write()
    (found,) = read_worker_reports(platform.settings)
    assert found.device_kind == "cpu"
    assert len(found.checks) > 5
    assert found.healthy is all(check.status != "failed" for check in found.checks)
    examined_at = found.examined_at
    reporter.write()
    (again,) = read_worker_reports(platform.settings)
    assert again.examined_at == examined_at  # not at every sweep
    assert again.seen_at >= found.seen_at
    reporter.remove()
    assert read_worker_reports(platform.settings) == []


def test_base_models_are_the_model_directories_below_the_roots(
    offline: Platform, tmp_path: Path
) -> None:
    root = offline.settings.model_roots[0]
    for path in ("Qwen3-32B", "org/small", ".hidden", "empty"):
        (root / path).mkdir(parents=True)
        if path != "empty":
            (root / path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
            (root / path / "model.safetensors").write_bytes(b"x" * 10)
    (root / "Qwen3-32B" / "config.json").write_text("[broken")
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "link").symlink_to(outside)
    items = offline.client().get("/base-models").json()["items"]
    assert [(i["path"], i["model_type"], i["size_bytes"]) for i in items] == [
        ("Qwen3-32B", None, 10),
        ("org/small", "qwen3", 10),
    ]


def test_devices_are_those_of_plans(offline: Platform) -> None:
    items = offline.client().get("/devices").json()["items"]
    k100 = next(item for item in items if item["name"] == "k100_ai")
    assert k100["memory_bytes"] == 65520 * 2**20
    assert 0 < k100["reserve_bytes"] < k100["memory_bytes"]
