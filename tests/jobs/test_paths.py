"""Paths in specs stay below the model roots."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.paths import latest_checkpoints, resolve_model
from services.shared.jobs.settings import JobSettings


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    for name in ("first/qwen", "second/llama", "outside/secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "first" / "link").symlink_to(tmp_path / "outside" / "secret")
    (tmp_path / "first" / "alias").symlink_to(tmp_path / "second" / "llama")
    (tmp_path / "first" / "file").touch()
    return [tmp_path / "first", tmp_path / "second"]


@pytest.mark.parametrize("path", ["qwen", "./qwen", "qwen/../qwen"])
def test_a_relative_path_is_found_below_a_root(roots: list[Path], path: str) -> None:
    assert resolve_model(path, roots=roots, field="model.path") == roots[0] / "qwen"


@pytest.mark.parametrize("path", ["llama", "alias"])
def test_every_root_is_searched_and_links_may_lead_between_them(
    roots: list[Path], path: str
) -> None:
    assert resolve_model(path, roots=roots, field="model.path") == roots[1] / "llama"


def test_an_absolute_path_inside_a_root_is_accepted(roots: list[Path]) -> None:
    path = str(roots[1] / "llama")
    assert resolve_model(path, roots=roots, field="model.path") == roots[1] / "llama"


@pytest.mark.parametrize(
    "path", ["../outside/secret", "/etc", "link", "none", "file", "qwen\x00", "x" * 5000]
)
def test_a_path_outside_the_roots_or_without_a_directory_is_refused(
    roots: list[Path], path: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve_model(path, roots=roots, field="student.path")
    assert refused.value.field == "student.path"


def test_without_roots_no_path_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="STILLHOUSE_MODEL_ROOTS"):
        resolve_model(str(tmp_path), roots=[], field="model.path")


def test_best_weights_alone_cannot_be_resumed_from(tmp_path: Path) -> None:
    settings = JobSettings(database_url="", broker_url="", data_dir=tmp_path)
    for attempt, name in (
        (1, "step-00000005"),
        (2, "best-00000005"),
        (3, ".step-00000009.partial"),
    ):
        kept = settings.run_dir("job_a", attempt) / "checkpoints" / name
        kept.mkdir(parents=True)
        (kept / "COMPLETE").touch()
    found = latest_checkpoints(settings, [("job_a", number) for number in (3, 2, 1)])
    assert found == settings.run_dir("job_a", 1) / "checkpoints"
