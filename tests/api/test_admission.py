"""A spec may name only directories below a model root with safetensors weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.api.admission import named_directories
from services.api.settings import ApiSettings
from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.spec import DistillSpec, TeacherSpec


def make_model(directory: Path, *files: str) -> Path:
    directory.mkdir(parents=True)
    for name in files or ("config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    make_model(tmp_path / "roots" / "qwen")
    make_model(tmp_path / "outside")
    return tmp_path / "roots"


@pytest.fixture
def settings(roots: Path) -> ApiSettings:
    return ApiSettings(
        database_url="x", broker_url="x", data_dir=roots.parent / "data", model_roots=[roots]
    )


def teacher(path: str) -> TeacherSpec:
    spec = {"kind": "teacher", "dataset_id": "ds_1", "model": {"path": path}}
    return TeacherSpec.model_validate(spec)


def distill(teacher: str, student: str) -> DistillSpec:
    spec = {
        "kind": "distill",
        "dataset_id": "ds_1",
        "teacher": {"path": teacher},
        "student": {"path": student},
    }
    return DistillSpec.model_validate(spec)


def test_a_model_below_a_root_is_admitted_by_either_path(
    settings: ApiSettings, roots: Path
) -> None:
    for path in ("qwen", str(roots / "qwen"), "./qwen/../qwen"):
        named_directories(teacher(path), settings=settings)


def test_a_path_outside_the_roots_is_rejected(settings: ApiSettings, roots: Path) -> None:
    (roots / "link").symlink_to(roots.parent / "outside")
    for path in ("../outside", str(roots.parent / "outside"), "link", "/etc", "/", "", ".."):
        with pytest.raises(InvalidRequest) as refused:
            named_directories(teacher(path), settings=settings)
        assert refused.value.field == "model.path"


def test_an_invalid_path_is_rejected(settings: ApiSettings, roots: Path) -> None:
    (roots / "a").symlink_to(roots / "b")
    (roots / "b").symlink_to(roots / "a")
    for path in ("none", "qwen/config.json", "x" * 5000, "a", "qwen\x00"):
        with pytest.raises(InvalidRequest) as refused:
            named_directories(teacher(path), settings=settings)
        assert refused.value.field == "model.path"


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (("model.safetensors",), "config.json"),
        (("config.json", "pytorch_model.bin"), "safetensors"),
    ],
)
def test_a_directory_without_config_or_safetensors_is_rejected(
    settings: ApiSettings, roots: Path, files: tuple[str, ...], missing: str
) -> None:
    make_model(roots / "odd", *files)
    with pytest.raises(InvalidRequest, match=missing):
        named_directories(teacher("odd"), settings=settings)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-2.safetensors"])
def test_a_symlink_that_leads_outside_the_roots_is_rejected(
    settings: ApiSettings, roots: Path, name: str
) -> None:
    (roots.parent / "secret").write_text("{}")
    (roots / "qwen" / name).unlink(missing_ok=True)
    (roots / "qwen" / name).symlink_to(roots.parent / "secret")
    with pytest.raises(InvalidRequest, match=f"{name}.* leads outside the model roots") as refused:
        named_directories(teacher("qwen"), settings=settings)
    assert refused.value.field == "model.path"


def test_symlinks_within_a_root_are_followed(settings: ApiSettings, roots: Path) -> None:
    """A hub cache stores files by hash and links to them."""
    make_model(roots / "blobs", "ab12")
    (roots / "qwen" / "model-2.safetensors").symlink_to(roots / "blobs" / "ab12")
    named_directories(teacher("qwen"), settings=settings)


def test_a_symlink_loop_is_rejected(settings: ApiSettings, roots: Path) -> None:
    (roots / "qwen" / "vocab.json").symlink_to(roots / "qwen" / "vocab.json")
    with pytest.raises(InvalidRequest, match=r"vocab\.json"):
        named_directories(teacher("qwen"), settings=settings)


def test_the_invalid_one_of_two_paths_is_named(settings: ApiSettings) -> None:
    for spec, field in [
        (distill("none", "qwen"), "teacher.path"),
        (distill("qwen", "none"), "student.path"),
    ]:
        with pytest.raises(InvalidRequest) as refused:
            named_directories(spec, settings=settings)
        assert refused.value.field == field


def test_without_any_root_no_path_is_admitted(tmp_path: Path) -> None:
    settings = ApiSettings(database_url="x", broker_url="x", data_dir=tmp_path)
    with pytest.raises(InvalidRequest, match="STILLHOUSE_MODEL_ROOTS"):
        named_directories(teacher("/"), settings=settings)
