"""The files of a model over HTTP: those of its manifest, whole or in part, and no others."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from services.api.event_streams import StreamLimiter
from services.api.problems import ProblemError
from tests.api.harness import JobDriver

CONTENT = {"heads.json": b"{}", "1_Pooling/config.json": b"[]", "model.safetensors": b"w" * 200_000}


@pytest.fixture
def model(desk: JobDriver) -> tuple[str, Path]:
    """A model with three files, and one that its manifest does not name."""
    model_id = desk.succeed(desk.running())
    directory = desk.store.model(model_id).path
    for name, content in CONTENT.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    (directory / "notes.txt").write_text("not of the artifact")
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}
    (directory / "manifest.json").write_text(json.dumps({"files": sums}))
    return model_id, directory


def test_files_are_listed_with_their_sums_and_downloaded(
    desk: JobDriver, model: tuple[str, Path]
) -> None:
    model_id, _ = model
    items = desk.client.get(f"/models/{model_id}/files").json()["items"]
    assert [item["name"] for item in items] == [*CONTENT, "manifest.json"]
    for item in items:
        found = desk.client.get(f"/models/{model_id}/files/{item['name']}").content
        assert len(found) == item["size_bytes"]
        assert hashlib.sha256(found).hexdigest() == item["sha256"]


def test_a_part_of_a_file_can_be_requested(desk: JobDriver, model: tuple[str, Path]) -> None:
    path = f"/models/{model[0]}/files/model.safetensors"
    part = desk.client.get(path, headers={"Range": "bytes=199990-"})
    assert (part.status_code, part.content) == (206, b"w" * 10)


@pytest.mark.parametrize(
    "name", ["notes.txt", "..%2Fmanifest.json", "%2Fetc%2Fpasswd", "1_Pooling", "gone"]
)
def test_no_other_file_can_be_read(desk: JobDriver, model: tuple[str, Path], name: str) -> None:
    response = desk.client.get(f"/models/{model[0]}/files/{name}")
    assert response.status_code == 404


def test_a_link_that_leads_out_of_the_model_is_not_followed(
    desk: JobDriver, model: tuple[str, Path]
) -> None:
    model_id, directory = model
    (directory / "heads.json").unlink()
    (directory / "heads.json").symlink_to("/etc/hostname")
    assert desk.client.get(f"/models/{model_id}/files/heads.json").status_code == 404


def test_downloads_of_one_key_are_limited() -> None:
    limiter = StreamLimiter(max_per_caller=1, what="downloads")
    with limiter.stream("a"):
        limiter.check("b")
        with pytest.raises(ProblemError, match="1 downloads of this key are open"):
            limiter.check("a")
    limiter.check("a")
