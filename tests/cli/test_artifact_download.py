from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest

from services.cli.artifact_download import download_artifact
from services.cli.client import Client, CommandFailed

CONTENT = {"heads.json": b"{}", "1_Pooling/config.json": b"[]"}


def client(content: dict[str, bytes], *, sums_of: dict[str, bytes] = CONTENT) -> Client:
    """A client of an API that serves `content` and lists the sums of other bytes."""

    def answer(request: httpx.Request) -> httpx.Response:
        name = request.url.path.partition("/files")[2].removeprefix("/")
        if name:
            return httpx.Response(200, content=content[name])
        items = [
            {
                "name": name,
                "size_bytes": len(listed),
                "sha256": hashlib.sha256(listed).hexdigest(),
            }
            for name, listed in sums_of.items()
        ]
        return httpx.Response(200, json={"items": items})

    return Client("http://api", transport=httpx.MockTransport(answer))


def test_all_files_are_written_and_compared_with_their_sums(tmp_path: Path) -> None:
    assert download_artifact(client(CONTENT), "mdl_1", tmp_path / "model") == 4
    for name, expected in CONTENT.items():
        assert (tmp_path / "model" / name).read_bytes() == expected


@pytest.mark.parametrize(
    ("content", "sums_of", "words"),
    [
        (CONTENT | {"heads.json": b"[]"}, CONTENT, "heads.json arrived damaged"),
        ({"../key": b""}, {"../key": b""}, "outside of the model"),
    ],
)
def test_after_a_damaged_or_hostile_file_nothing_is_left(
    tmp_path: Path, content: dict[str, bytes], sums_of: dict[str, bytes], words: str
) -> None:
    with pytest.raises(CommandFailed, match=words):
        download_artifact(client(content, sums_of=sums_of), "mdl_1", tmp_path / "a" / "model")
    assert not any((tmp_path / "a").iterdir())


def test_a_directory_with_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(CommandFailed, match="is not empty: choose another"):
        download_artifact(client(CONTENT), "mdl_1", tmp_path)
