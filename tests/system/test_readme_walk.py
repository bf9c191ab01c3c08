"""The README's tour of every endpoint, run verbatim against real processes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from tests.system.conftest import RunningPlatform

README = Path(__file__).parents[2] / "README.md"
MARKER = "<!-- The system test runs this block"
# An unsuccessful response ends the tour and prints its problem document.
PREFIX = 'set -euo pipefail\ncurl() { command curl --fail-with-body --max-time 240 "$@"; }\n'

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


def tour() -> str:
    """Return the shell block that follows the marker."""
    after = README.read_text("utf-8").split(MARKER, 1)[1]
    return after.split("```bash\n", 1)[1].split("```", 1)[0]


@pytest.fixture(scope="module")
def tour_dir(platform: RunningPlatform, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the tour was run."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed on this machine; the README's tour needs it")
    folder = tmp_path_factory.mktemp("walk")
    script = PREFIX + tour().replace("http://127.0.0.1:8000", platform.url)
    result = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=400
    )
    (folder / "output.txt").write_text(result.stdout)
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return folder


def test_the_tour_of_the_readme_works_verbatim(tour_dir: Path) -> None:
    assert "positive" in (tour_dir / "output.txt").read_text()


def test_teacher_and_student_succeed_and_are_accurate(
    tour_dir: Path, platform: RunningPlatform
) -> None:
    teacher = json.loads((tour_dir / "job.json").read_text())["id"]
    student = json.loads((tour_dir / "student-job.json").read_text())["id"]
    for job_id in (teacher, student):
        job = httpx.get(f"{platform.url}/jobs/{job_id}").json()
        assert job["state"] == "succeeded", job
        assert job["plan"]["verdict"] == "fits"
        assert set(job["measured"]) == {"0", "1"}
    assert job["metrics"]["heads"]["sentiment"]["accuracy"] > 0.9
    assert job["metrics"]["teacher"]["heads"]["sentiment"]["accuracy"] > 0.9


def test_the_promoted_student_answers_with_its_model_version(
    tour_dir: Path, platform: RunningPlatform
) -> None:
    answer = httpx.post(f"{platform.url}/predict", json={"inputs": "the room was dirty"})
    assert answer.json()[0]["label"] == "negative"
    model = httpx.get(f"{platform.url}/promotions").json()["items"][0]["model_id"]
    assert model in answer.headers["X-Model-Version"]


def test_the_tour_covers_every_route(tour_dir: Path, platform: RunningPlatform) -> None:
    paths = httpx.get(f"{platform.url}/openapi.json").json()["paths"]
    text = tour()
    for written in ("$DATASET", "$JOB", "$STUDENT", "$OTHER", "$UNUSED", "heads.json"):
        text = text.replace(written, "{id}")
    missing = [path for path in paths if _pattern(path) not in text]
    assert missing == []


def test_the_first_rank_reports_progress_soon_after_submission(
    tour_dir: Path, platform: RunningPlatform, record_property: Callable[[str, object], None]
) -> None:
    job = json.loads((tour_dir / "job.json").read_text())
    progress = platform.data_dir / "runs" / job["id"] / "1" / "progress.jsonl"
    first = progress.read_text().splitlines()[0]
    sent = datetime.fromisoformat(job["created_at"].replace("Z", "+00:00")).timestamp()
    seconds = json.loads(first)["time"] - sent
    record_property("from POST /jobs to the first progress of a rank", f"{seconds:.1f} s")
    assert 0 < seconds < 60


def _pattern(path: str) -> str:
    """Return a route as the tour writes it."""
    parts = ["{id}" if part.startswith("{") else part for part in path.split("/")]
    return "/".join(parts)
