"""Uploads over HTTP are stored completely or rejected with the lines at fault."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from httpx2 import Response

from services.api.routes import datasets
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import Unavailable
from tests.api.harness import Platform

HEADS = json.dumps([{"name": "sentiment"}])


def rows(count: int = 40) -> list[dict[str, str]]:
    return [
        {"text": f"第{number}条评论", "sentiment": ("good", "bad")[number % 2]}
        for number in range(count)
    ]


def jsonl(records: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records).encode()


def upload(
    client: TestClient, content: bytes, *, filename: str = "reviews.jsonl", **fields: str
) -> Response:
    form = {"heads": HEADS, **fields}
    return client.post("/datasets", files={"file": (filename, content)}, data=form)


def left_over(platform: Platform) -> list[Path]:
    settings = platform.settings
    return [*settings.datasets_dir.iterdir(), *settings.uploads_dir.iterdir()]


@pytest.fixture
def client(platform: Platform) -> TestClient:
    return platform.client()


def test_an_upload_is_stored_and_shown(client: TestClient, platform: Platform) -> None:
    response = upload(client, jsonl(rows()), name="reviews")
    assert response.status_code == 201
    card = response.json()
    assert response.headers["location"] == f"/datasets/{card['id']}"
    assert card["heads"] == [
        {"name": "sentiment", "type": "single_label", "labels": ["bad", "good"]}
    ]
    assert sum(card["rows"].values()) == 40
    assert client.get(f"/datasets/{card['id']}").json() == card
    assert client.get("/datasets").json()["items"] == [card]
    assert left_over(platform) == [platform.settings.dataset_dir(card["id"])]


def test_csv_with_a_bom_and_parquet_are_read_too(client: TestClient) -> None:
    csv = "text,sentiment\n" + "".join(f"{row['text']},{row['sentiment']}\n" for row in rows())
    parquet = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows()), parquet)
    for filename, content in [
        ("a.csv", b"\xef\xbb\xbf" + csv.encode()),
        ("a.parquet", parquet.getvalue()),
    ]:
        response = upload(client, content, filename=filename)
        assert (response.status_code, response.json()["name"]) == (201, "a")


def test_columns_and_fractions_are_configurable(client: TestClient) -> None:
    records = [{"t": row["text"], "s": row["sentiment"]} for row in rows(200)]
    response = upload(
        client,
        jsonl(records),
        text_column="t",
        heads=json.dumps([{"name": "sentiment", "column": "s"}]),
        fractions=json.dumps({"train": 0.5, "validation": 0.25, "test": 0.25}),
    )
    assert response.json()["rows"]["train"] < 150


def test_unlabelled_text_needs_no_heads(client: TestClient) -> None:
    assert upload(client, jsonl(rows()), heads="[]").json()["heads"] == []


def test_errors_name_their_line_and_nothing_is_stored(
    client: TestClient, platform: Platform
) -> None:
    records = rows()
    records[2]["text"] = " "
    records[5]["sentiment"] = 3  # type: ignore[assignment]
    response = upload(client, jsonl(records))
    assert response.status_code == 422
    body = response.json()
    assert body["type"].endswith(":invalid-dataset")
    assert [fault["line"] for fault in body["faults"]] == [3, 6]
    assert body["total_faults"] == 2
    assert left_over(platform) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"heads": "{"}, "heads"),
        ({"heads": "[" * 10_000 + "]" * 10_000}, "heads"),
        ({"heads": '[{"name": "1"}]'}, "heads.0.name"),
        ({"heads": '[{"nam": "a"}]'}, "heads.0.name"),
        ({"fractions": '{"train": 2}'}, "fractions.train"),
        ({"fractions": '{"train": NaN}'}, "fractions.train"),
        ({"format": "xls"}, "format"),
        ({"name": ""}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"surprise": "x"}, "surprise"),
    ],
)
def test_an_invalid_field_is_named(client: TestClient, fields: dict[str, str], named: str) -> None:
    response = upload(client, jsonl(rows()), **fields)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == named


def test_the_format_is_detected_by_content_and_can_be_given(client: TestClient) -> None:
    assert upload(client, jsonl(rows()), filename="reviews.txt").status_code == 201
    response = upload(client, jsonl(rows()), filename="reviews.txt", format="xlsx")
    assert response.json()["faults"][0]["message"].startswith("is not a readable Excel workbook")


def test_a_rejection_says_what_was_found_and_how_to_repeat(client: TestClient) -> None:
    records = [{"review": row["text"], "sentiment": row["sentiment"]} for row in rows()]
    body = upload(client, jsonl(records), filename="my reviews.jsonl").json()
    assert body["found"] == "jsonl, encoding utf-8, columns 'review', 'sentiment'"
    assert body["command"] == (
        "stillhouse datasets add 'my reviews.jsonl' --text-column review --head sentiment"
    )


def test_a_preview_shows_rows_and_labels_and_stores_nothing(
    client: TestClient, platform: Platform
) -> None:
    files = {"file": ("reviews.jsonl", jsonl(rows()))}
    response = client.post("/datasets/preview", files=files)
    assert response.status_code == 200
    body = response.json()
    assert body["label_counts"] == {"sentiment": {"good": 20, "bad": 20}}
    assert body["first_rows"][0] == {"text": "第0条评论", "sentiment": "good"}
    assert (body["acceptable"], body["complete"], body["examined_rows"]) == (True, True, 40)
    assert body["command"] == "stillhouse datasets add reviews.jsonl --head sentiment"
    assert left_over(platform) == []


@pytest.mark.parametrize("filename", ["../../etc/passwd.jsonl", "a/b.jsonl", "页.jsonl"])
def test_a_file_name_cannot_escape_the_data_directory(
    client: TestClient, platform: Platform, filename: str
) -> None:
    response = upload(client, jsonl(rows()), filename=filename)
    assert response.status_code == 201
    assert left_over(platform) == [platform.settings.dataset_dir(response.json()["id"])]


def test_a_form_without_a_file_is_refused(client: TestClient) -> None:
    for response in (
        client.post("/datasets", data={"heads": HEADS}),
        client.post("/datasets", json={"file": "x"}),
        client.post("/datasets"),
        client.post("/datasets", files={"file": (None, "text")}),
    ):
        assert response.status_code == 422
        assert response.json()["errors"][0]["field"] == "file"


def test_a_broken_multipart_body_is_malformed(client: TestClient) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    response = client.post("/datasets", content=b"--y\r\nnonsense", headers=headers)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"


def test_a_second_file_is_rejected(client: TestClient) -> None:
    files = [("file", ("a.jsonl", b"{}")), ("file", ("b.jsonl", b"{}"))]
    assert client.post("/datasets", files=files).status_code == 400


def test_an_upload_over_the_limit_is_rejected_while_it_streams(platform: Platform) -> None:
    more = {"upload_limit_bytes": 1000}
    platform.settings = type(platform.settings)(**{**platform.settings.model_dump(), **more})
    response = upload(platform.client(), jsonl(rows(200)))
    assert response.status_code == 413
    assert left_over(platform) == []


def test_a_dataset_that_cannot_be_registered_leaves_no_files(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(store: Store, card: Any, **more: Any) -> None:
        raise Unavailable("away")

    monkeypatch.setattr(Store, "add_dataset", away)
    assert upload(platform.client(), jsonl(rows())).status_code == 503
    assert left_over(platform) == []


def test_a_full_disk_is_reported(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(datasets, "ingest_in_sandbox", full)
    response = upload(platform.client(), jsonl(rows()))
    assert (response.status_code, response.json()["type"]) == (
        507,
        "urn:stillhouse:problem:disk-full",
    )
    assert left_over(platform) == []
