"""Files that were made to exhaust memory, disk or time, or to write elsewhere, are rejected quickly."""

from __future__ import annotations

import gzip
import io
import json
import time
import zipfile
from pathlib import Path

import pytest
import zstandard

from services.shared.datasets.formats.compression import unzip
from services.shared.datasets.ingest import ingest
from services.shared.datasets.sandbox import ingest_in_sandbox, preview_in_sandbox
from services.shared.datasets.upload import DatasetRejected, Format, Layout
from tests.datasets.shapes import archive, jsonl, rows, table
from tests.sandboxes import validations

LAYOUT = Layout.model_validate({"heads": [{"name": "mood"}]})
ZEROS = bytes(100 * 2**20)
BOMBS = {
    "gzip": gzip.compress(ZEROS),
    "zstd": zstandard.ZstdCompressor().compress(ZEROS),
    "zip": archive({"a.csv": ZEROS}),
    "many members": archive({f"{n}.csv": ZEROS[: 2**23] for n in range(12)}),
    "gzip of gzip": gzip.compress(gzip.compress(gzip.compress(gzip.compress(b"text\na\n")))),
}


def _reject(content: bytes, directory: Path, **options: object) -> DatasetRejected:
    upload = directory / "upload"
    upload.write_bytes(content)
    layout = Layout.model_validate({**LAYOUT.model_dump(), **options})
    with pytest.raises(DatasetRejected) as rejected:
        ingest(upload, layout=layout, id="ds_1", name="x", datasets_dir=directory / "datasets")
    assert [path.name for path in directory.iterdir()] == ["upload"]
    return rejected.value


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_rejected(tmp_path: Path, kind: str) -> None:
    message = str(_reject(BOMBS[kind], tmp_path))
    assert "decompresses to more than" in message or "archives within archives" in message


@pytest.mark.parametrize("name", ["../escaped.csv", "/tmp/escaped.csv", "a/../../escaped.csv"])
def test_an_archive_cannot_write_outside_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.zip").write_bytes(archive({name: b"text\na\n"}))
    (tmp_path / "inside").mkdir()
    with pytest.raises(DatasetRejected, match="unsafe path"):
        unzip(tmp_path / "a.zip", tmp_path / "inside")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "inside"]


def test_an_encrypted_or_damaged_archive_is_rejected(tmp_path: Path) -> None:
    damaged = bytearray(archive({"a.csv": table(rows()).encode()}))
    damaged[60:90] = bytes(30)
    assert "is not a readable zip archive" in str(_reject(bytes(damaged), tmp_path))


def test_a_truncated_gzip_file_is_rejected(tmp_path: Path) -> None:
    content = gzip.compress(jsonl(rows()))[:-20]
    assert "is not a readable gzip file" in str(_reject(content, tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        ("text," * 60_000 + "\n").encode(),
        ("text," + ",".join(f"c{n}" for n in range(200_000)) + "\n").encode(),
        b"[" + b"[" * 3_000_000,
        b'[{"text": "' + b"a" * 3_900_000,
        b'{"text": "a"} ' * 200_000 + b"{",
        b"{" * 2_000_000,
        b'[{"text":' + b" " * 3_000_000,
        b"[" + b"," * 1_000_000,
        ("__label__" + " __label__" * 300_000).encode(),
        b"\xff\xfe" + ("a" * 3_000_000).encode("utf-16-le"),
        b"\r" * 1_000_000,
        b'"' * 3_000_000,
        b";,|\t_!_" * 400_000,
    ],
    ids=range(13),
)
def test_a_hostile_text_file_is_rejected_in_linear_time(tmp_path: Path, content: bytes) -> None:
    started = time.perf_counter()
    _reject(content, tmp_path)
    assert (
        time.perf_counter() - started < 20
    )  # measured: under 2 s; a quadratic reader takes minutes


def test_many_list_looking_labels_are_parsed_in_bounds(tmp_path: Path) -> None:
    nested = "[" * 5000 + "]" * 5000
    records = [*rows(topics=(["a"], ["b"])), {"text": "nested", "topics": nested}]
    heads = [{"name": "topics", "type": "multi_label"}]
    assert "are not a valid list" in str(_reject(jsonl(records), tmp_path, heads=heads))


def test_a_workbook_that_understates_its_size_is_stopped_by_the_sandbox(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as writer:
        writer.writestr("xl/workbook.xml", b"<workbook>" + bytes(520 * 2**20))
    upload = tmp_path / "upload"
    upload.write_bytes(file.getvalue())
    with pytest.raises(DatasetRejected, match="unpacks to more than 536,870,912 bytes"):
        ingest_in_sandbox(
            validations(),
            upload,
            layout=LAYOUT,
            id="ds_1",
            name="x",
            datasets_dir=tmp_path / "datasets",
        )


def test_a_preview_in_the_sandbox_equals_one_outside(tmp_path: Path) -> None:
    upload = tmp_path / "upload"
    upload.write_bytes(gzip.compress(jsonl(rows())))
    shown = preview_in_sandbox(validations(), upload, layout=Layout(), filename="a.gz")
    assert shown.command == "stillhouse datasets add a.gz --head mood"
    assert shown.label_counts == {"mood": {"good": 20, "bad": 20}}
    assert [path.name for path in tmp_path.iterdir()] == ["upload"]


def test_a_rejection_in_the_sandbox_keeps_what_was_found(tmp_path: Path) -> None:
    upload = tmp_path / "upload"
    upload.write_bytes(gzip.compress(json.dumps([{"review": "a", "mood": "b"}]).encode()))
    with pytest.raises(DatasetRejected) as rejected:
        ingest_in_sandbox(
            validations(),
            upload,
            format=Format.JSON,
            layout=LAYOUT,
            id="ds_1",
            name="x",
            datasets_dir=tmp_path / "datasets",
        )
    assert rejected.value.found == "json in gzip, encoding utf-8, columns 'review', 'mood'"
    assert rejected.value.command.startswith("stillhouse datasets add FILE --text-column review")
