"""The shapes of files that users have, made with neutral content, and what becomes of each.

`python -m tests.datasets.shapes` writes the table of docs/datasets.md.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from services.shared.datasets.upload import Layout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "datasets.md"
START, END = "<!-- shapes -->\n", "<!-- end of shapes -->\n"
MOODS = ("good", "bad")
TEXTS = [f"Parcel number {n} arrived, as the note says" for n in range(40)]
CHINESE = [f"第{n}个包裹已经送到，包装完好，说明写得很清楚" for n in range(40)]
TAIWANESE = [f"第{n}個包裹已經送到，包裝完好，說明寫得很清楚" for n in range(40)]
FRENCH = [f"Le colis n° {n} est arrivé à l’heure, très bien emballé" for n in range(40)]
MOOD = {"heads": [{"name": "mood"}]}
TOPICS = {"heads": [{"name": "topics", "type": "multi_label"}]}


@dataclass(frozen=True)
class Shape:
    """A file and its options, whether it is accepted, and a part of what the answer says."""

    group: str
    title: str
    content: bytes
    options: dict[str, Any] = field(default_factory=lambda: MOOD)
    flags: str = "--head mood"
    accepted: bool = True
    says: str = ""  # of a warning, or of the first fault
    labels: Sequence[str] | None = MOODS  # of the first head
    rows: int | None = None

    @property
    def layout(self) -> Layout:
        """Return the options as a layout."""
        return Layout.model_validate(self.options)


def rows(texts: Sequence[str] = TEXTS, **columns: Sequence[Any]) -> list[dict[str, Any]]:
    """Return rows of a text, a mood where no columns are given, and the columns repeated to fit."""
    columns = columns or {"mood": MOODS}
    return [
        {"text": text, **{name: values[n % len(values)] for name, values in columns.items()}}
        for n, text in enumerate(texts)
    ]


def jsonl(records: Iterable[Any]) -> bytes:
    """Return JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records).encode()


def table(
    records: Sequence[dict[str, Any]],
    delimiter: str = ",",
    *,
    header: bool = True,
    end: str = "\n",
    index: bool = False,
) -> str:
    """Return a delimited table."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, lineterminator=end)
    names = list(records[0])
    if header:
        writer.writerow([""] * index + names)
    for number, row in enumerate(records):
        writer.writerow([number] * index + [row[name] for name in names])
    return file.getvalue()


def parquet(data: pa.Table) -> bytes:
    """Return a Parquet file."""
    file = io.BytesIO()
    pq.write_table(data, file)
    return file.getvalue()


def arrow(data: pa.Table) -> bytes:
    """Return an Arrow stream, as `save_to_disk` writes it."""
    file = io.BytesIO()
    with pa.ipc.new_stream(file, data.schema) as writer:
        writer.write_table(data)
    return file.getvalue()


def class_labels(data: pa.Table, names: list[str]) -> pa.Table:
    """Return the table with the metadata of a ClassLabel feature `mood`."""
    features = {"mood": {"names": names, "_type": "ClassLabel"}}
    return data.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )


def xlsx(records: Sequence[dict[str, Any]], *, sheets: int = 1) -> bytes:
    """Return an Excel workbook."""
    book = openpyxl.Workbook()
    sheet = book.worksheets[0]
    sheet.append(list(records[0]))
    for row in records:
        sheet.append(list(row.values()))
    for number in range(1, sheets):
        book.create_sheet(f"Notes{number}")
    file = io.BytesIO()
    book.save(file)
    return file.getvalue()


def archive(members: dict[str, bytes]) -> bytes:
    """Return a zip archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as writer:
        for name, content in members.items():
            writer.writestr(name, content)
    return file.getvalue()


def with_flags(flags: str, **options: Any) -> dict[str, Any]:
    """Return the fields of a shape that is read with a head `mood` and more options."""
    return {"options": {**MOOD, **options}, "flags": f"--head mood {flags}"}


def topics(flags: str = "", **options: Any) -> dict[str, Any]:
    """Return the fields of a shape that is read with a multi-label head `topics`."""
    return {
        "options": {**TOPICS, **options},
        "flags": f"--head topics:multi_label {flags}".strip(),
        "labels": ("price", "speed"),
    }


def refused(says: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of a shape that is refused."""
    return {"accepted": False, "says": says, **fields}


def formats() -> list[Shape]:
    """Return files of every format."""
    arrow_table = pa.Table.from_pylist(rows())
    ids = pa.Table.from_pylist(rows(mood=(0, 1)))
    text_files = {
        f"{mood}/{n}.txt": TEXTS[n].encode() for n in range(40) for mood in [MOODS[n % 2]]
    }
    splits = {
        f"{name}.csv": table(rows(TEXTS[a:b])).encode()
        for name, a, b in (("train", 0, 30), ("dev", 30, 36), ("test", 36, 40))
    }
    saved = {
        "dataset_info.json": json.dumps(
            {"features": {"mood": {"names": ["bad", "good"], "_type": "ClassLabel"}}}
        ).encode(),
        "state.json": b"{}",
        "data-00000-of-00001.arrow": arrow(ids),
    }
    group = "Formats"
    return [
        Shape(group, "JSON lines", jsonl(rows())),
        Shape(group, "JSON array on one line", json.dumps(rows()).encode()),
        Shape(group, "JSON array over many lines", json.dumps(rows(), indent=2).encode()),
        Shape(
            group,
            "JSON objects, each over several lines",
            "\n".join(json.dumps(row, indent=2) for row in rows()).encode(),
        ),
        Shape(
            group,
            "JSON array that is cut off",
            json.dumps(rows(), indent=2).encode()[:-60],
            **refused("is not valid JSON"),
        ),
        Shape(
            group,
            "JSON object that holds the rows",
            json.dumps({"version": 1, "data": rows()}).encode(),
            **refused("is one object, whose key 'data' holds 40 rows; send that array itself"),
        ),
        Shape(
            group,
            "JSON object of columns",
            json.dumps({"text": TEXTS, "mood": [*MOODS] * 20}).encode(),
            **refused("is one object of columns; send one object a row"),
        ),
        Shape(group, "CSV", table(rows()).encode()),
        Shape(group, "CSV with CRLF", table(rows(), end="\r\n").encode()),
        Shape(group, "CSV with lone CR", table(rows(), end="\r").encode()),
        Shape(group, "CSV with the index of pandas", table(rows(), index=True).encode()),
        Shape(group, "TSV", table(rows(), "\t").encode()),
        Shape(group, "Semicolons", table(rows(), ";").encode()),
        Shape(group, "Vertical bars", table(rows(), "|").encode()),
        Shape(
            group,
            "Separator `_!_`",
            "".join(f"{n}_!_{MOODS[n % 2]}_!_{text}\n" for n, text in enumerate(TEXTS)).encode(),
            options={
                "text_column": "column3",
                "heads": [{"name": "mood", "column": "column2"}],
            },
            flags="--text-column column3 --head mood=column2",
        ),
        Shape(
            group,
            "CSV without a header",
            table(rows(), header=False).encode(),
            options={"text_column": "column1", "heads": [{"name": "mood", "column": "column2"}]},
            flags="--text-column column1 --head mood=column2",
        ),
        Shape(
            group,
            "CSV without a header, not declared",
            table(rows(), header=False).encode(),
            **refused("no such column; the file has 'Parcel number 0"),
        ),
        Shape(
            group,
            "fastText",
            "".join(f"__label__{MOODS[n % 2]} {text}\n" for n, text in enumerate(TEXTS)).encode(),
            options={"heads": [{"name": "mood", "type": "multi_label", "column": "labels"}]},
            flags="--head mood:multi_label=labels",
        ),
        Shape(group, "Excel .xlsx", xlsx(rows())),
        Shape(
            group,
            "Excel .xlsx with several sheets",
            xlsx(rows(), sheets=2),
            says="only the first sheet, 'Sheet', was read",
        ),
        Shape(
            group,
            "Excel .xls",
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500),
            **refused("is an old Excel workbook (.xls); save it as .xlsx or CSV"),
        ),
        Shape(group, "Parquet", parquet(arrow_table)),
        Shape(
            group,
            "Parquet with ClassLabel names",
            parquet(class_labels(ids, ["bad", "good"])),
            says="the ids were read as the names that the file states: 'bad', 'good'",
        ),
        Shape(group, "Arrow stream", arrow(arrow_table)),
        Shape(
            group,
            "`save_to_disk` directory with ClassLabel names",
            archive(saved),
            says="the names that the file states: 'bad', 'good'",
        ),
        Shape(group, "gzip", gzip.compress(jsonl(rows()))),
        Shape(group, "zstd", zstandard.ZstdCompressor().compress(jsonl(rows()))),
        Shape(group, "zip of one file", archive({"rows.csv": table(rows()).encode()})),
        Shape(
            group,
            "bzip2",
            b"BZh91AY&SY" + bytes(100),
            **refused("is compressed with bzip2; send it uncompressed, or as gzip, zip or zstd"),
        ),
        Shape(
            group,
            "zip of several tables without a split in their names",
            archive({"a.csv": table(rows()).encode(), "b.csv": table(rows()).encode()}),
            **refused("name them train, validation and test, or send one"),
        ),
        Shape(
            group,
            "train, dev and test files",
            archive(splits),
            says="the splits are those of the files, in this order: train.csv (train)",
            rows=40,
        ),
        Shape(
            group,
            "Folders of text files by class",
            archive(text_files),
            options={"heads": [{"name": "mood", "column": "label"}]},
            flags="--head mood=label",
        ),
        Shape(group, "PDF", b"%PDF-1.7\n" + bytes(100), **refused("is a PDF document")),
        Shape(group, "Unknown binary file", bytes(range(32)) * 9, **refused("binary")),
        Shape(group, "Empty file", b"", **refused("there are no rows")),
    ]


def encodings() -> list[Shape]:
    """Return text files in many encodings."""
    group = "Encodings"
    chinese = table(rows(CHINESE))
    return [
        Shape(group, "UTF-8 with a byte order mark", b"\xef\xbb\xbf" + chinese.encode()),
        Shape(
            group,
            "UTF-16 with a byte order mark",
            chinese.encode("utf-16"),
            says="the text was read as utf-16",
        ),
        Shape(
            group,
            "UTF-16 without one",
            table(rows()).encode("utf-16-le"),
            says="the text was read as utf-16-le",
        ),
        Shape(
            group,
            "UTF-32",
            chinese.encode("utf-32"),
            says="the text was read as utf-32",
        ),
        Shape(group, "GBK", chinese.encode("gbk"), says="the text was read as gb18030"),
        Shape(
            group,
            "Big5",
            table(rows(TAIWANESE)).encode("big5"),
            says="the text was read as big5",
        ),
        Shape(
            group,
            "cp1252",
            table(rows(FRENCH)).encode("cp1252"),
            says="the text was read as cp1252; if it looks wrong, give the encoding (--encoding)",
        ),
        Shape(
            group,
            "GBK, declared",
            chinese.encode("gbk"),
            **with_flags("--encoding gbk", encoding="gbk"),
        ),
        Shape(
            group,
            "An encoding that cannot be told apart",
            table(rows(["很好吃", "太慢了"])).encode("gbk") * 2,
            **refused("is not UTF-8, and its encoding is ambiguous: gb18030 or euc_kr"),
        ),
        Shape(
            group,
            "UTF-8 with one damaged line",
            chinese.encode() + b"caf\xe9,good\n",
            **refused("is not UTF-8: byte 4 of the line is 0xe9"),
        ),
        Shape(
            group,
            "The same, bad rows left out",
            chinese.encode() + b"caf\xe9,good\n",
            says="1 rows with faults were left out: line 42: is not UTF-8",
            **with_flags("--skip-bad-rows", on_bad_rows="skip"),
        ),
    ]


def label_columns() -> list[Shape]:
    """Return labels in many forms."""
    group = "Labels"
    flags = [{"price": n % 2, "speed": (n // 2) % 2, "size": n % 3 == 0} for n in range(40)]
    one_hot = [row | f for row, f in zip(rows(mood=("good", "bad")), flags, strict=True)]
    two_hot = [[1, 0], [0, 1], [1, 1], [0, 0]]
    gathered = {"heads": [{"name": "topics", "type": "multi_label", "columns": ["price", "speed"]}]}
    names = {"label_names": {"mood": {"0": "bad", "1": "good"}}}
    return [
        Shape(group, "Integers", jsonl(rows(mood=(0, 1))), labels=("0", "1")),
        Shape(
            group,
            "Integers with names",
            jsonl(rows(mood=(0, 1))),
            **with_flags("--label-names mood=bad,good", **names),
        ),
        Shape(
            group,
            "An integer without a name",
            jsonl(rows(mood=(0, 1, 2))),
            **refused("the label '2' has no name; the names are for 0, 1."),
            **with_flags("--label-names mood=bad,good", **names),
        ),
        Shape(
            group,
            "Ids beside a column that describes them",
            table(rows(mood=(0, 1), name=MOODS)).encode(),
            says="'mood' holds ids that another column describes",
            labels=("0", "1"),
        ),
        Shape(
            group,
            "Floating-point numbers 0.0 and 1.0",
            table(rows(mood=("0.0", "1.0"))).encode(),
            says="40 numbers such as 1.0 were read as the label '1'",
            labels=("0", "1"),
        ),
        Shape(
            group,
            "Floating-point numbers that are no classes",
            jsonl(rows(mood=(0.25, 0.5))),
            **refused("the label is a floating-point number, not a string or an integer"),
        ),
        Shape(
            group,
            "Booleans",
            jsonl(rows(mood=(True, False))),
            says="40 booleans were read as the labels 'true' and 'false'",
            labels=("false", "true"),
        ),
        Shape(
            group,
            "NaN in JSON or Parquet",
            jsonl(rows(mood=("good", "bad", float("nan")))),
            says="13 values are NaN and were read as no label",
        ),
        Shape(
            group,
            "nan in CSV",
            table(rows(mood=("good", "bad", "nan"))).encode(),
            says="'nan' (13 texts) was read as a class; if it means that there is no label",
            labels=("bad", "good", "nan"),
        ),
        Shape(
            group,
            "nan in CSV, declared missing",
            table(rows(mood=("good", "bad", "nan"))).encode(),
            **with_flags("--missing-label nan", missing_labels=["nan"]),
        ),
        Shape(
            group,
            "-1 for a missing label",
            jsonl(rows(mood=(0, 1, -1))),
            says="'-1' (13 texts) was read as a class; if it means that there is no label",
            labels=("-1", "0", "1"),
        ),
        Shape(group, "Empty labels", table(rows(mood=("good", "bad", ""))).encode()),
        Shape(
            group,
            "Labels that differ in case",
            jsonl(rows(mood=("good", "bad", "Good", "good"))),
            says="the labels 'Good' (10), 'good' (20) differ only in case",
            labels=("Good", "bad", "good"),
        ),
        Shape(
            group,
            "The same, merged",
            jsonl(rows(mood=("good", "bad", "Good", "good"))),
            **with_flags("--merge-labels", merge_labels=True),
        ),
        Shape(
            group,
            "Full-width labels",
            jsonl(rows(mood=("1", "2", "１"))),
            says="differ only in case, width",
            labels=("1", "2", "１"),
        ),
        Shape(
            group,
            "Labels with zero-width characters",
            jsonl(rows(mood=("good", "bad", "good\u200b"))),
            says="or invisible characters; merge_labels (--merge-labels)",
            labels=("bad", "good", "good\u200b"),
        ),
        Shape(
            group,
            "Lists for a single-label head",
            jsonl(rows(mood=(["good"], ["bad"]))),
            **refused("the label is a list, not a string or an integer; declare the head as"),
        ),
        Shape(
            group,
            "List-looking strings for a single-label head",
            table(rows(mood=("['good']", "['bad']"))).encode(),
            **refused("labels look like lists, for example \"['good']\"; declare the head as"),
        ),
        Shape(group, "Lists", jsonl(rows(topics=(["price"], ["speed", "price"]))), **topics()),
        Shape(
            group,
            "JSON lists in CSV",
            table(rows(topics=('["price"]', '["speed", "price"]'))).encode(),
            **topics(),
        ),
        Shape(
            group,
            "Python lists in CSV",
            table(rows(topics=("['price']", "['speed', 'price']", "[]"))).encode(),
            **topics(),
        ),
        Shape(
            group, "Labels `a|b`", table(rows(topics=("price", "speed|price"))).encode(), **topics()
        ),
        Shape(
            group,
            "Labels `a;b`, separator not declared",
            table(rows(topics=("price", "speed", "speed;price"))).encode(),
            **refused("look like several joined by ';'; give label_separator", **topics()),
        ),
        Shape(
            group,
            "Labels `a;b`",
            table(rows(topics=("price", "speed", "speed;price"))).encode(),
            **topics("--label-separator ';'", label_separator=";"),
        ),
        Shape(
            group,
            "Labels `a,b`",
            jsonl(rows(topics=("price", "speed", "speed, price"))),
            **topics("--label-separator ,", label_separator=","),
        ),
        Shape(
            group,
            "Labels `a;b` for a single-label head",
            jsonl(rows(mood=("price", "speed", "speed;price", "price;speed"))),
            says="were read as one label each; if they are several, declare --head mood:multi_label",
            labels=("price", "price;speed", "speed", "speed;price"),
        ),
        Shape(
            group,
            "One-hot columns, gathered",
            table(one_hot).encode(),
            options=gathered,
            flags="--head topics:multi_label=price,speed",
            labels=("price", "speed"),
        ),
        Shape(
            group,
            "A column of 0 and 1 for a multi-label head",
            table(rows(topics=(0, 1))).encode(),
            **refused("a multi_label head has only the values '0', '1'", **topics()),
        ),
        Shape(
            group,
            "Vectors of 0 and 1",
            jsonl(rows(topics=two_hot)),
            **refused("for vectors of 0 and 1, name the positions in label_names", **topics()),
        ),
        Shape(
            group,
            "Vectors of 0 and 1, with names",
            jsonl(rows(topics=two_hot)),
            **topics(
                "--label-names topics=price,speed",
                label_names={"topics": {"0": "price", "1": "speed"}},
            ),
        ),
        Shape(
            group,
            "A map of labels",
            jsonl({"text": t, "labels": {"mood": MOODS[n % 2]}} for n, t in enumerate(TEXTS)),
        ),
        Shape(
            group,
            "A label column in Chinese",
            jsonl(rows(情感=MOODS)),
            options={"heads": [{"name": "mood", "column": "情感"}]},
            flags="--head mood=情感",
        ),
        Shape(
            group,
            "No head at all",
            jsonl(rows()),
            options={},
            flags="",
            says="no head was declared: the texts are stored without labels",
            labels=None,
        ),
    ]


def exports() -> list[Shape]:
    """Return exports of annotation tools."""
    group = "Exports"

    def annotation(*choices: str) -> dict[str, Any]:
        value = {"choices": list(choices)}
        return {"result": [{"from_name": "mood", "type": "choices", "value": value}]}

    full = [
        {"id": n, "data": {"text": text}, "annotations": [annotation(MOODS[n % 2])]}
        for n, text in enumerate(TEXTS)
    ]
    disagreeing = [*full[:-1], full[-1] | {"annotations": [annotation("good"), annotation("bad")]}]
    minimal = [{**row, "id": n, "annotator": 1, "annotation_id": n} for n, row in enumerate(rows())]
    choices = [
        {**row, "topics": json.dumps({"choices": ["price", "speed"]}) if n % 2 else "price"}
        for n, row in enumerate(minimal)
    ]
    doccano = [{"id": n, **row} for n, row in enumerate(rows(label=(["good"], ["bad"], [])))]
    spans = [{"id": n, **row} for n, row in enumerate(rows(label=([[0, 4, "NAME"]],)))]
    argilla = [
        {
            "fields": {"text": text},
            "responses": {"mood": [{"value": MOODS[n % 2], "status": "submitted"}]},
        }
        for n, text in enumerate(TEXTS)
    ]
    flat = [
        {"text": t, "mood.responses": [MOODS[n % 2]], "mood.responses.status": ["submitted"]}
        for n, t in enumerate(TEXTS)
    ]
    prodigy = [
        {**row, "_task_hash": n}
        for n, row in enumerate(rows(accept=(["good"], ["bad"]), answer=("accept",)))
    ]
    ignored = [*prodigy, {"text": "Unclear", "accept": [], "answer": "ignore", "_task_hash": 99}]
    label: dict[str, Any] = {
        "options": {"heads": [{"name": "mood", "column": "label"}]},
        "flags": "--head mood=label",
    }
    return [
        Shape(group, "Label Studio, JSON", json.dumps(full).encode()),
        Shape(
            group,
            "Label Studio, annotators that disagree",
            json.dumps(disagreeing).encode(),
            **refused('was labelled differently by its annotators (mood: ["good"], ["bad"])'),
        ),
        Shape(group, "Label Studio, minimal JSON", json.dumps(minimal).encode()),
        Shape(group, "Label Studio, CSV with choices", table(choices).encode(), **topics()),
        Shape(group, "doccano", jsonl(doccano), **label),
        Shape(
            group,
            "doccano, spans",
            jsonl(spans),
            **refused("has labels of spans of the text, not of the whole text", **label),
        ),
        Shape(group, "Argilla, records", json.dumps(argilla).encode()),
        Shape(group, "Argilla, flat", jsonl(flat)),
        Shape(
            group,
            "prodigy with ignored tasks",
            jsonl(ignored),
            says="1 rows that the annotators did not accept were left out",
            rows=40,
            **label,
        ),
    ]


def texts_and_splits() -> list[Shape]:
    """Return texts and splits that need an option or a correction."""
    group = "Texts, rows and splits"
    split = ("train", "train", "train", "dev", "test")
    chats = [
        {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "Thank you"},
            ],
            "mood": MOODS[n % 2],
        }
        for n, text in enumerate(TEXTS)
    ]
    pairs = [
        {"premise": text, "hypothesis": text[:9], "mood": MOODS[n % 2]}
        for n, text in enumerate(TEXTS)
    ]
    controls = [{"text": "a\x08b", "mood": "good"}, *rows()]
    long = [{"text": "word " * 200_001, "mood": "good"}, *rows()]
    escaped = "text,mood\n" + "".join(
        f'"He said \\"fine\\" {n}",{MOODS[n % 2]}\n' for n in range(40)
    )
    stray = table(rows()) + '"a "stray" quote",good\n'
    return [
        Shape(
            group,
            "Another name of the text column",
            table([{"review": r["text"], "mood": r["mood"]} for r in rows()]).encode(),
            **refused("no such column; the file has 'review', 'mood'"),
        ),
        Shape(
            group,
            "The same in JSON",
            jsonl({"review": r["text"], "mood": r["mood"]} for r in rows()),
            **refused("no such column; the file has 'review', 'mood'"),
        ),
        Shape(
            group,
            "A split column, not declared",
            jsonl(rows(mood=MOODS, split=split)),
            says="the column 'split' states a split and was not read; give split_column",
        ),
        Shape(
            group,
            "A split column",
            jsonl(rows(mood=MOODS, split=split)),
            rows=40,
            **with_flags("--split-column split", split_column="split"),
        ),
        Shape(
            group,
            "A split column without validation rows",
            jsonl(rows(mood=MOODS, split=("train", "train", "test"))),
            **refused("the validation split is empty: the upload states its splits"),
            **with_flags("--split-column split", split_column="split"),
        ),
        Shape(
            group,
            "A text in two of the stated splits",
            jsonl(
                [*rows(mood=MOODS, split=split), {"text": TEXTS[0], "mood": "bad", "split": "test"}]
            ),
            says="1 rows repeat a text of another split and were moved to it: lines 41",
            **with_flags("--split-column split", split_column="split"),
        ),
        Shape(
            group,
            "Chat messages",
            jsonl(chats),
            says="the texts are chat messages: they are rendered by the chat template",
            **with_flags("--text-column messages", text_column="messages"),
        ),
        Shape(
            group,
            "A string among chat messages",
            jsonl([*chats, {"messages": "alone", "mood": "good"}]),
            **refused(
                "the text is a string, but the texts before it are chat messages",
                **with_flags("--text-column messages", text_column="messages"),
            ),
        ),
        Shape(
            group,
            "Pairs of texts, one column declared",
            jsonl(pairs),
            says="look like a pair of texts, of which only 'premise' is read; to read both, give text_pair_column",
            **with_flags("--text-column premise", text_column="premise"),
        ),
        Shape(
            group,
            "Pairs of texts",
            jsonl(pairs),
            **with_flags(
                "--text-column premise --text-pair-column hypothesis",
                text_column="premise",
                text_pair_column="hypothesis",
            ),
        ),
        Shape(
            group,
            "Pairs without the second column",
            jsonl(pairs),
            **refused(
                "no such column; the file has 'premise', 'hypothesis', 'mood'",
                **with_flags(
                    "--text-column premise --text-pair-column claim",
                    text_column="premise",
                    text_pair_column="claim",
                ),
            ),
        ),
        Shape(
            group,
            "Quotes escaped with a backslash",
            escaped.encode(),
            **refused("give quotes as backslash (--quotes backslash)"),
        ),
        Shape(
            group,
            "The same, declared",
            escaped.encode(),
            **with_flags("--quotes backslash", quotes="backslash"),
        ),
        Shape(
            group,
            "TSV with unbalanced quotes",
            (table(rows(), "\t") + '"Stray\tgood\n').encode(),
            **with_flags("--quotes none", quotes="none"),
        ),
        Shape(group, "A stray quote", stray.encode(), **refused("is not valid CSV")),
        Shape(
            group,
            "A stray quote, bad rows left out",
            stray.encode(),
            says="1 rows with faults were left out: line 42: is not valid CSV",
            rows=40,
            **with_flags("--skip-bad-rows", on_bad_rows="skip"),
        ),
        Shape(
            group,
            "A row with too many fields",
            (table(rows()) + "a,b,c\n").encode(),
            **refused("has 3 fields, but the header has 2"),
        ),
        Shape(
            group,
            "An empty text",
            jsonl([{"text": " ", "mood": "good"}, *rows()]),
            **refused("the text is empty"),
        ),
        Shape(
            group,
            "A NUL character",
            jsonl([{"text": "a\x00b", "mood": "good"}, *rows()]),
            **refused("the text contains a NUL character"),
        ),
        Shape(
            group,
            "Other control characters",
            jsonl(controls),
            **refused(
                "the text contains the control character U+0008; to remove such characters, give "
                "on_control_characters as remove (--remove-control-characters)"
            ),
        ),
        Shape(
            group,
            "The same, removed",
            jsonl(controls),
            says="control characters were removed from 1 texts: lines 1",
            **with_flags("--remove-control-characters", on_control_characters="remove"),
        ),
        Shape(
            group,
            "A text of more than 1,000,000 characters",
            jsonl(long),
            **refused("the text is longer than 1,000,000"),
        ),
        Shape(
            group,
            "The same, truncated",
            jsonl(long),
            says="1 texts were truncated: lines 1",
            **with_flags("--truncate-long-texts", on_long_texts="truncate"),
        ),
        Shape(
            group,
            "Duplicate rows",
            jsonl([*rows(), *rows()[:2]]),
            says="2 rows duplicate an earlier row and were dropped: lines 41, 42",
            rows=40,
        ),
        Shape(
            group,
            "A column twice in the header",
            table(rows()).replace("text,mood", "text,text").encode(),
            **refused("the header contains this column twice"),
        ),
        Shape(
            group,
            "A header of 50,000 columns",
            ("text," + ",".join(f"c{n}" for n in range(50_000)) + "\n").encode(),
            **refused("the header has 50,001 columns; at most 4,096 are read"),
        ),
    ]


def shapes() -> list[Shape]:
    """Return every shape."""
    return [*formats(), *encodings(), *label_columns(), *exports(), *texts_and_splits()]


def page_table(found: Sequence[Shape]) -> str:
    """Return the table of docs/datasets.md."""
    lines, group = [], ""
    for shape in found:
        if shape.group != group:
            group = shape.group
            lines += ["", f"### {group}", "", "| Shape | Options | Outcome |", "|---|---|---|"]
        outcome = "Accepted" if shape.accepted else "Refused"
        said = shape.says.replace("|", "\\|")
        said = f"{outcome}: “{said}”" if said else f"{outcome}."
        flags = shape.flags.replace("|", "\\|")
        lines.append(
            f"| {shape.title.replace('|', chr(92) + '|')} | {f'`{flags}`' if flags else ''} | {said} |"
        )
    return "\n".join(lines).lstrip("\n") + "\n"


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + START + page_table(shapes()) + END + after, encoding="utf-8")
    sys.stdout.write(f"{len(shapes())} shapes\n")


if __name__ == "__main__":
    main()
