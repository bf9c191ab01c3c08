"""Rejected uploads: every fault is reported with its line, and no upload causes a crash."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.shared.datasets.formats.records import MAX_LINE_BYTES
from services.shared.datasets.ingest import ingest
from services.shared.datasets.upload import (
    DatasetRejected,
    Fault,
    Format,
    Layout,
    SplitFractions,
)
from services.shared.datasets.validator import MAX_CLASSES

if TYPE_CHECKING:
    from tests.datasets.conftest import Ingestor, JsonLines


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ({"text": "", "mood": "sad"}, "text", "the text is empty"),
        ({"text": " \u3000\n", "mood": "sad"}, "text", "the text is empty"),
        ({"mood": "sad"}, "text", "the text is missing"),
        ({"text": None, "mood": "sad"}, "text", "the text is missing"),
        ({"text": 7, "mood": "sad"}, "text", "the text is an integer, not a string"),
        ({"text": ["a"], "mood": "sad"}, "text", "the text is a list, not a string"),
        ({"text": "a\x00b", "mood": "sad"}, "text", "the text contains a NUL character"),
        ({"text": "a\ud800", "mood": "sad"}, "text", "the text contains a lone surrogate"),
        ({"text": "x" * 1_000_001}, "text", "the text is longer than 1,000,000 characters"),
        ({"text": "a", "mood": 1.5}, "mood", "the label is a floating-point number, not a"),
        ({"text": "a", "mood": float("inf")}, "mood", "the label is a floating-point number"),
        ({"text": "a", "mood": -1e300}, "mood", "the label is a floating-point number"),
        ({"text": "a", "mood": {"x": 1}}, "mood", "the label is an object, not a string"),
        ({"text": "a", "mood": ["sad"]}, "mood", "the label is a list, not a string"),
        ({"text": "a", "mood": "s\x00"}, "mood", "the label contains a NUL character"),
        ({"text": "a", "mood": "s" * 201}, "mood", "the label is longer than 200 characters"),
        ({"text": "a", "mood": 10**300}, "mood", "the label is longer than 200 characters"),
        ({"text": "a", "labels": {"mood": 0.5}}, "mood", "the label is a floating-point number"),
        ({"text": "a", "labels": "{broken"}, "labels", "the map of labels is not valid JSON"),
        ({"text": "a", "mood": "unique"}, "mood", "label 'unique' has only this example"),
        ("[1, 2]", None, "is not a JSON object"),
        ('{"text": "a"', None, "is not valid JSON: "),
        ("nonsense", None, "is not valid JSON: "),
        ("[" * 100_000, None, "is nested too deeply"),
        ('{"text": "a", "mood": ' + "9" * 5000 + "}", None, "is not valid JSON: "),
    ],
)
def test_a_fault_is_reported_with_its_line(
    ingestor: Ingestor, jsonl: JsonLines, row: Any, field: str | None, message: str
) -> None:
    (fault,) = ingestor.faults(jsonl(row))
    assert (fault.line, fault.field) == (41, field)
    assert fault.message.startswith(message)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "the labels are an integer, not a list or a string separated by |"),
        (["a", None], "the label is null, not a string or an integer"),
        (["a", " "], "a label is empty"),
        (["a", 0.5], "the label is a floating-point number, not a string or an integer"),
    ],
)
def test_a_fault_in_a_list_of_labels_is_reported(
    ingestor: Ingestor, value: Any, message: str
) -> None:
    layout = Layout.model_validate({"heads": [{"name": "topics", "type": "multi_label"}]})
    rows = [{"text": f"t {n}", "topics": ["a", "b"]} for n in range(40)]
    rows.append({"text": "odd", "topics": value})
    content = "\n".join(json.dumps(row) for row in rows).encode()
    assert ingestor.faults(content, layout=layout) == [
        Fault(line=41, field="topics", message=message)
    ]


def test_twenty_faults_are_reported_and_all_are_counted(
    ingestor: Ingestor, jsonl: JsonLines
) -> None:
    rows = [{"text": "", "mood": 0.5} for _ in range(50)]
    with pytest.raises(DatasetRejected) as rejected:
        ingestor.ingest(jsonl(*rows))
    assert (len(rejected.value.faults), rejected.value.total) == (20, 100)
    assert str(rejected.value).startswith("line 41, text: the text is empty; line 41, mood: ")
    assert str(rejected.value).endswith("(and 80 more)")


@pytest.mark.parametrize("format", [Format.JSONL, Format.CSV, Format.PARQUET])
def test_bytes_that_are_not_utf_8_are_reported(ingestor: Ingestor, format: Format) -> None:
    rows = [(f"text {n}", ("glad", "sad")[n % 2]) for n in range(40)]
    if format is Format.PARQUET:
        texts = pa.array([text.encode() for text, _ in rows] + [b"caf\xe9"]).cast(
            pa.string(), safe=False
        )
        file = io.BytesIO()
        pq.write_table(pa.table({"text": texts, "mood": [m for _, m in rows] + ["sad"]}), file)
        content, line, message = file.getvalue(), 41, "contains text that is not UTF-8"
    elif format is Format.CSV:
        content = "".join(f"{text},{mood}\r\n" for text, mood in [("text", "mood"), *rows]).encode()
        content += b"caf\xe9,sad\r\n"
        line, message = 42, "is not UTF-8: byte 4 of the line is 0xe9"
    else:
        content = "".join(json.dumps({"text": t, "mood": m}) + "\n" for t, m in rows).encode()
        content += b'{"text": "caf\xe9", "mood": "sad"}'
        line, message = 41, "is not UTF-8: byte 14 of the line is 0xe9"
    assert ingestor.faults(content, format=format) == [
        Fault(line=line, field=None, message=message)
    ]


def test_an_overlong_line_is_not_read_into_memory(ingestor: Ingestor, jsonl: JsonLines) -> None:
    content = jsonl("x" * (2 * MAX_LINE_BYTES + 5), {"text": "", "mood": "sad"})
    faults = ingestor.faults(content)
    assert [(fault.line, fault.message) for fault in faults] == [
        (41, "is longer than 4,194,304 bytes"),
        (42, "the text is empty"),
    ]


def _csv(*lines: str) -> bytes:
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (_csv("text,mood", "a,b,c"), 2, "has 3 fields, but the header has 2"),
        (_csv("text,mood", "a"), 2, "has 1 fields, but the header has 2"),
        (_csv("words,mood", "a,b"), 1, "no such column; the file has 'words', 'mood'"),
        (_csv("text,text", "a,b"), 1, "the header contains this column twice"),
        (_csv("text,mood", '"a"b,c'), 2, "is not valid CSV: "),
        (_csv("text,mood", '"a,c', "d,e"), 2, "is not valid CSV: "),
    ],
)
def test_a_csv_fault_is_reported_with_its_line(
    ingestor: Ingestor, content: bytes, line: int, message: str
) -> None:
    fault = ingestor.faults(content, format=Format.CSV)[0]
    assert fault.line == line
    assert fault.message.startswith(message)


@pytest.mark.parametrize("format", [Format.JSONL, Format.CSV, Format.PARQUET])
def test_an_empty_file_is_rejected(ingestor: Ingestor, format: Format) -> None:
    (fault,) = ingestor.faults(b"", format=format)
    expected = "is not a readable Parquet file" if format is Format.PARQUET else "there are no rows"
    assert fault.message.startswith(expected)


def test_parquet_without_the_text_column_is_rejected(ingestor: Ingestor) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"words": ["a"]}), file)
    (fault,) = ingestor.faults(file.getvalue(), format=Format.PARQUET)
    assert (fault.field, fault.message) == ("text", "no such column; the file has 'words'")


def test_a_head_needs_two_labels(ingestor: Ingestor) -> None:
    one = "".join(json.dumps({"text": f"t {n}", "mood": "sad"}) + "\n" for n in range(40))
    (fault,) = ingestor.faults(one.encode())
    assert (fault.field, fault.message) == (
        "mood",
        "has only the label 'sad'; at least two are required",
    )


def test_a_head_without_a_column_is_rejected(ingestor: Ingestor, jsonl: JsonLines) -> None:
    layout = Layout.model_validate({"heads": [{"name": "mood"}, {"name": "topic"}]})
    (fault,) = ingestor.faults(jsonl(), layout=layout)
    assert fault.field == "topic"
    assert fault.message.startswith("has no labels: no row has a value in column 'topic'")


def test_a_class_with_one_example_is_reported_with_its_line(
    ingestor: Ingestor, jsonl: JsonLines
) -> None:
    faults = ingestor.faults(jsonl({"text": "a", "mood": "angry"}, {"text": "b", "mood": "bored"}))
    assert [(fault.line, fault.message) for fault in faults] == [
        (41, "label 'angry' has only this example; at least two are required"),
        (42, "label 'bored' has only this example; at least two are required"),
    ]


def test_a_duplicate_row_does_not_count_as_a_second_example(
    ingestor: Ingestor, jsonl: JsonLines
) -> None:
    odd = {"text": "a", "mood": "angry"}
    (fault,) = ingestor.faults(jsonl(odd, odd))
    assert fault.line == 41


def test_an_upload_too_small_for_a_validation_split_is_rejected(ingestor: Ingestor) -> None:
    rows = [("good", "glad"), ("bad", "sad"), ("fine", "glad"), ("awful", "sad")]
    content = "\n".join(json.dumps({"text": t, "mood": m}) for t, m in rows).encode()
    fractions = {"train": 0.98, "validation": 0.01, "test": 0.01}
    layout = ingestor.layout.model_copy(
        update={"fractions": SplitFractions.model_validate(fractions)}
    )
    (fault,) = ingestor.faults(content, layout=layout)
    assert fault.message.startswith("the validation split is empty: 4 different texts")


def test_a_column_of_ids_is_rejected_as_a_head(ingestor: Ingestor) -> None:
    rows = (json.dumps({"text": f"t {n}", "mood": n}) for n in range(MAX_CLASSES + 1))
    faults = ingestor.faults("\n".join(rows).encode())
    assert faults[0].message == "has more than 10,000 different labels"


@pytest.mark.parametrize(
    "layout",
    [
        {"heads": [{"name": "text"}]},
        {"heads": [{"name": "line"}]},
        {"heads": [{"name": "mood"}, {"name": "mood"}]},
        {"heads": [{"name": "0mood"}]},
        {"heads": [{"name": "mood", "colour": "red"}]},
        {"fractions": {"train": 0.5, "validation": 0.1, "test": 0.1}},
        {"fractions": {"train": 0, "validation": 0.5, "test": 0.5}},
    ],
)
def test_an_inconsistent_layout_is_rejected(layout: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Layout.model_validate(layout)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
ROW = st.fixed_dictionaries(
    {}, optional={"text": JSON | st.text(max_size=5), "mood": JSON, "labels": JSON}
)


def _ingest_or_reject(path: Path, content: bytes, format: Format) -> None:
    """Ingest an upload and check that the result is a complete dataset or a list of faults."""
    upload, datasets = path / "upload", path / "datasets"
    upload.write_bytes(content)
    layout = Layout.model_validate({"heads": [{"name": "mood"}]})
    try:
        card = ingest(
            upload, format=format, layout=layout, id="ds_1", name="x", datasets_dir=datasets
        )
    except DatasetRejected as rejected:
        assert 0 < len(rejected.faults) <= min(20, rejected.total)  # noqa: PT017
        assert not datasets.exists()
        return
    stored = [pq.read_table(datasets / "ds_1" / f"{split}.parquet") for split in card.rows]
    assert sum(table.num_rows for table in stored) == sum(card.rows.values()) > 0
    (datasets / "ds_1").rename(path / "done")
    datasets.rmdir()
    for file in (path / "done").iterdir():
        file.unlink()
    (path / "done").rmdir()


ANY_UPLOAD = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@ANY_UPLOAD
@given(rows=st.lists(ROW, max_size=8))
def test_arbitrary_json_is_stored_or_rejected_with_faults(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    valid = [{"text": f"t {n}", "mood": ("glad", "sad")[n % 2]} for n in range(30)]
    content = "\n".join(json.dumps(row) for row in valid + rows).encode()
    _ingest_or_reject(tmp_path, content, Format.JSONL)


@ANY_UPLOAD
@given(tail=st.binary(max_size=200) | st.text('",|\n\r\x00ab', max_size=40).map(str.encode))
@pytest.mark.parametrize("format", [Format.JSONL, Format.CSV])
def test_arbitrary_bytes_are_stored_or_rejected_with_faults(
    tmp_path: Path, format: Format, tail: bytes
) -> None:
    head = "text,mood\n" + "".join(f"t {n},{('glad', 'sad')[n % 2]}\n" for n in range(30))
    _ingest_or_reject(tmp_path, head.encode() + tail, format)


@ANY_UPLOAD
@given(position=st.integers(min_value=0), byte=st.integers(0, 255), cut=st.booleans())
def test_corrupted_parquet_is_stored_or_rejected_with_faults(
    tmp_path: Path, position: int, byte: int, cut: bool
) -> None:
    file = io.BytesIO()
    texts = [f"t {n}" for n in range(40)]
    pq.write_table(pa.table({"text": texts, "mood": ["glad", "sad"] * 20}), file)
    content = bytearray(file.getvalue())
    position %= len(content)
    content[position] = byte
    _ingest_or_reject(tmp_path, bytes(content[:position] if cut else content), Format.PARQUET)
