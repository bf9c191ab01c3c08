"""A Parquet decompression bomb is rejected, and only a subprocess runs out of memory."""

from __future__ import annotations

import io
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.shared.datasets.card import DatasetCard
from services.shared.datasets.formats.arrow_tables import read_parquet
from services.shared.datasets.formats.records import MAX_ROWS
from services.shared.datasets.ingest import ingest
from services.shared.datasets.sandbox import ingest_in_sandbox
from services.shared.datasets.upload import DatasetRejected, Fault, Format, Layout
from tests.sandboxes import validations

LAYOUT = Layout.model_validate({"heads": [{"name": "mood"}]})
MOODS = ["glad", "sad"]
MEMORY = 1024 * 2**20


def parquet(path: Path, texts: pa.Array) -> Path:
    moods = pa.array([MOODS[n % 2] for n in range(len(texts))])
    pq.write_table(pa.table({"text": texts, "mood": moods}), path, compression="zstd")
    return path


def repeated(text: str, rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def ingest_upload(upload: Path, datasets_dir: Path, memory_bytes: int = MEMORY) -> DatasetCard:
    return ingest_in_sandbox(
        validations(memory_bytes=memory_bytes),
        upload,
        format=Format.PARQUET,
        layout=LAYOUT,
        id="ds_1",
        name="moods",
        datasets_dir=datasets_dir,
    )


def test_an_ordinary_upload_is_stored_as_without_the_sandbox(tmp_path: Path) -> None:
    upload = parquet(tmp_path / "upload", pa.array([f"text {n}" for n in range(60)]))
    sandboxed = ingest_upload(upload, tmp_path / "sandboxed")
    plain = ingest(
        upload,
        format=Format.PARQUET,
        layout=LAYOUT,
        id="ds_1",
        name="moods",
        datasets_dir=tmp_path / "plain",
    )
    assert sandboxed == plain
    for split in sandboxed.rows:
        name = f"ds_1/{split}.parquet"
        assert pq.read_table(tmp_path / "sandboxed" / name) == pq.read_table(
            tmp_path / "plain" / name
        )


def test_a_kilobyte_that_decompresses_to_gigabytes_is_rejected(tmp_path: Path) -> None:
    upload = parquet(tmp_path / "upload", repeated("x" * 2**24, 3000))  # 48 GB of text
    assert upload.stat().st_size < 20_000
    before = psutil.Process().memory_info().rss
    with pytest.raises(DatasetRejected, match="needs more than 1,073,741,824 bytes of memory"):
        ingest_upload(upload, tmp_path / "datasets")
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    assert list(tmp_path.glob("datasets/*")) == []


def test_faults_are_returned_unchanged(tmp_path: Path) -> None:
    upload = parquet(tmp_path / "upload", pa.array(["a", "", None, *(f"t {n}" for n in range(40))]))
    with pytest.raises(DatasetRejected) as rejected:
        ingest_upload(upload, tmp_path / "datasets")
    assert rejected.value.total == 2
    assert rejected.value.faults[0] == Fault(line=2, field="text", message="the text is empty")


def test_an_error_of_the_disk_is_not_a_fault_of_the_upload(tmp_path: Path) -> None:
    upload = parquet(tmp_path / "upload", pa.array([f"text {n}" for n in range(60)]))
    (tmp_path / "datasets").write_text("a file where a directory should be")
    with pytest.raises(NotADirectoryError):
        ingest_upload(upload, tmp_path / "datasets")


def test_an_upload_that_takes_too_long_is_rejected(tmp_path: Path) -> None:
    rows = "".join(f'{{"text": "text {n}", "mood": "{n % 2}"}}\n' for n in range(1_000_000))
    (tmp_path / "upload").write_text(rows)
    with pytest.raises(DatasetRejected, match="did not finish within 1 s"):
        ingest_in_sandbox(
            validations(seconds=1),
            tmp_path / "upload",
            layout=LAYOUT,
            id="ds_1",
            name="moods",
            datasets_dir=tmp_path,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["upload"]


def test_too_many_rows_are_rejected_before_the_first_is_read(tmp_path: Path) -> None:
    rows = MAX_ROWS + 1
    indices = pa.array(memoryview(bytes(rows)).cast("b"), pa.int8())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array(["a"]))})
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=rows, compression="zstd")
    assert len(file.getvalue()) < 100_000
    (tmp_path / "upload").write_bytes(file.getvalue())
    found = list(read_parquet(tmp_path / "upload", columns=["text"]))
    assert found == [Fault(line=None, field=None, message="has more than 20,000,000 rows")]
