"""Every shape of docs/datasets.md has the outcome and the message that the page states."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.shared.datasets.card import DatasetCard
from services.shared.datasets.ingest import ingest
from services.shared.datasets.preview import preview
from services.shared.datasets.upload import DatasetRejected
from tests.datasets.shapes import END, PAGE, START, Shape, page_table, shapes

SHAPES = shapes()


def _ingest(shape: Shape, directory: Path) -> DatasetCard:
    upload = directory / "upload"
    upload.write_bytes(shape.content)
    return ingest(
        upload, layout=shape.layout, id="ds_1", name="x", datasets_dir=directory / "datasets"
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.title)
def test_a_shape_has_its_outcome(tmp_path: Path, shape: Shape) -> None:
    if not shape.accepted:
        with pytest.raises(DatasetRejected) as rejected:
            _ingest(shape, tmp_path)
        assert shape.says in rejected.value.faults[0].message
        assert not (tmp_path / "datasets").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["upload"]
        return
    card = _ingest(shape, tmp_path)
    assert [h.labels for h in card.heads] == ([sorted(shape.labels)] if shape.labels else [])
    assert shape.says in " ".join(card.warnings)
    assert shape.says or card.warnings == []
    assert sum(card.rows.values()) == (shape.rows or sum(card.rows.values())) > 0
    assert {path.name for path in tmp_path.iterdir()} == {"upload", "datasets"}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.title)
def test_a_preview_agrees_with_the_outcome(tmp_path: Path, shape: Shape) -> None:
    """A preview may complete the options, so that it can be better than the outcome, never worse."""
    upload = tmp_path / "upload"
    upload.write_bytes(shape.content)
    try:
        shown = preview(upload, layout=shape.layout, filename="FILE")
    except DatasetRejected:
        assert not shape.accepted
        return
    assert shown.acceptable or not shape.accepted
    assert shown.command.startswith("stillhouse datasets add FILE")
    assert [path.name for path in tmp_path.iterdir()] == ["upload"]


def test_the_page_lists_every_shape() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(START)[2].partition(END)[0] == page_table(SHAPES)
    assert len(SHAPES) >= 60
    assert len({shape.title for shape in SHAPES}) == len(SHAPES)
