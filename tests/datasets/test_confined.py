"""A Parquet file that unpacks to far more than its size is refused, and only a child process feels it."""

from __future__ import annotations

import io
import os
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.shared.datasets.card import DatasetCard
from services.shared.datasets.confined import ingest_confined
from services.shared.datasets.ingest import ingest
from services.shared.datasets.reader import MAX_PARQUET_ROWS, read_records
from services.shared.datasets.upload import DatasetRejected, Fault, Format, Layout

LAYOUT = Layout.model_validate({"heads": [{"name": "mood"}]})
MOODS = ["glad", "sad"]
MEMORY = 1024 * 2**20


def parquet(path: Path, texts: pa.Array) -> Path:
    moods = pa.array([MOODS[n % 2] for n in range(len(texts))])
    pq.write_table(pa.table({"text": texts, "mood": moods}), path, compression="zstd")
    return path


def repeated(text: str, rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def take(upload: Path, datasets_dir: Path, memory_bytes: int = MEMORY) -> DatasetCard:
    return ingest_confined(
        upload,
        format=Format.PARQUET,
        layout=LAYOUT,
        id="ds_1",
        name="moods",
        datasets_dir=datasets_dir,
        memory_bytes=memory_bytes,
    )


def test_an_honest_upload_is_what_it_would_be_without_the_process(tmp_path: Path) -> None:
    upload = parquet(tmp_path / "upload", pa.array([f"text {n}" for n in range(60)]))
    confined = take(upload, tmp_path / "confined")
    plain = ingest(
        upload,
        format=Format.PARQUET,
        layout=LAYOUT,
        id="ds_1",
        name="moods",
        datasets_dir=tmp_path / "plain",
    )
    assert confined == plain
    for split in confined.rows:
        name = f"ds_1/{split}.parquet"
        assert pq.read_table(tmp_path / "confined" / name) == pq.read_table(
            tmp_path / "plain" / name
        )


def test_a_kilobyte_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    upload = parquet(tmp_path / "upload", repeated("x" * 2**24, 3000))  # 48 GB of text
    assert upload.stat().st_size < 20_000
    before = psutil.Process().memory_info().rss
    with pytest.raises(DatasetRejected, match="cannot be read within 1,073,741,824 bytes"):
        take(upload, tmp_path / "datasets")
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    assert list(tmp_path.glob("datasets/*")) == []


def test_faults_come_back_as_they_are(tmp_path: Path) -> None:
    upload = parquet(tmp_path / "upload", pa.array(["a", "", None, *(f"t {n}" for n in range(40))]))
    with pytest.raises(DatasetRejected) as refused:
        take(upload, tmp_path / "datasets")
    assert refused.value.total == 2
    assert refused.value.faults[0] == Fault(line=2, field="text", message="the text is empty")


def test_a_fault_of_the_disk_is_none_of_the_file(tmp_path: Path) -> None:
    upload = parquet(tmp_path / "upload", pa.array([f"text {n}" for n in range(60)]))
    (tmp_path / "datasets").write_text("a file where a directory should be")
    with pytest.raises(NotADirectoryError):
        take(upload, tmp_path / "datasets")


def test_the_process_is_told_no_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is read by another name for the interpreter, which writes it down."""
    spy = tmp_path / "python"
    spy.write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\nkill -9 $$\n")
    spy.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(spy))
    monkeypatch.setenv("STILLHOUSE_DATABASE_URL", "postgresql://user:hush@db/x")
    with pytest.raises(DatasetRejected):
        take(parquet(tmp_path / "upload", pa.array(["a"])), tmp_path / "datasets")
    environment = (tmp_path / "environment").read_text()
    assert f"PATH={os.environ['PATH']}" in environment
    assert "STILLHOUSE_" not in environment
    assert "hush" not in environment


def test_a_process_that_breaks_otherwise_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho ImportError: no such room >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(broken))
    with pytest.raises(RuntimeError, match=r"broke: .*no such room"):
        take(parquet(tmp_path / "upload", pa.array(["a"])), tmp_path / "datasets")


def test_rows_without_end_are_refused_before_the_first(tmp_path: Path) -> None:
    rows = MAX_PARQUET_ROWS + 1
    indices = pa.array(memoryview(bytes(rows)).cast("b"), pa.int8())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array(["a"]))})
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=rows, compression="zstd")
    assert len(file.getvalue()) < 100_000
    (tmp_path / "upload").write_bytes(file.getvalue())
    found = list(read_records(tmp_path / "upload", format=Format.PARQUET, columns=["text"]))
    assert found == [Fault(line=None, field=None, message="has more than 20,000,000 rows")]
