"""An ingestion harness and builders of small uploads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from services.shared.datasets.card import DatasetCard, Split
from services.shared.datasets.ingest import ingest
from services.shared.datasets.upload import DatasetRejected, Fault, Format, Layout

JsonLines = Callable[..., bytes]


class Ingestor:
    """Ingests uploads into a directory of its own, always as the dataset `ds_1`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.datasets_dir = directory / "datasets"
        self.layout = Layout.model_validate({"heads": [{"name": "mood"}]})

    def ingest(
        self, content: bytes | Path, *, format: Format = Format.JSONL, layout: Layout | None = None
    ) -> DatasetCard:
        """Ingest bytes or a file."""
        path = content if isinstance(content, Path) else self.directory / "upload"
        if isinstance(content, bytes):
            path.write_bytes(content)
        return ingest(
            path,
            format=format,
            layout=layout or self.layout,
            id="ds_1",
            name="reviews",
            datasets_dir=self.datasets_dir,
        )

    def faults(
        self, content: bytes | Path, *, format: Format = Format.JSONL, layout: Layout | None = None
    ) -> list[Fault]:
        """Return the faults of an upload, having checked that nothing of it is kept."""
        with pytest.raises(DatasetRejected) as rejected:
            self.ingest(content, format=format, layout=layout)
        assert not self.datasets_dir.exists()
        return rejected.value.faults

    def stored(self, split: Split) -> list[dict[str, Any]]:
        """Return the rows of a stored split."""
        rows: list[dict[str, Any]] = pq.read_table(
            self.datasets_dir / "ds_1" / f"{split}.parquet"
        ).to_pylist()
        return rows

    def all_stored(self) -> list[dict[str, Any]]:
        """Return the stored rows of all splits in the order of the upload."""
        rows = [row for split in Split for row in self.stored(split)]
        return sorted(rows, key=lambda row: row["line"])


@pytest.fixture
def ingestor(tmp_path: Path) -> Ingestor:
    return Ingestor(tmp_path)


@pytest.fixture
def jsonl() -> JsonLines:
    """Write rows as JSON lines, after `valid` rows with two moods, so that no split is empty."""

    def write(*rows: Any, valid: int = 40) -> bytes:
        moods = ("glad", "sad")
        lines = [json.dumps({"text": f"text {n}", "mood": moods[n % 2]}) for n in range(valid)]
        lines += [row if isinstance(row, str) else json.dumps(row) for row in rows]
        return "".join(line + "\n" for line in lines).encode()

    return write
