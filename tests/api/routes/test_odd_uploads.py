"""Compressed and non-UTF-8 uploads are read within bounds, and what hides in them is rejected."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile

import pytest
from fastapi.testclient import TestClient
from httpx2 import Response

from tests.api.harness import Platform

ROWS = "".join(
    json.dumps(
        {"text": f"naïve Texte {n}", "mood": "froh" if n % 2 else "trüb"}, ensure_ascii=False
    )
    + "\n"
    for n in range(40)
)
BOMB = gzip.compress(bytes(50 * 2**20))  # 50 MB of zeros in 50 kB


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", content)
    return file.getvalue()


READABLE = {
    "gzip": gzip.compress(ROWS.encode()),
    "zip": zipped(ROWS.encode()),
    "UTF-16": ROWS.encode("utf-16"),
    "UTF-32": ROWS.encode("utf-32"),
    "Latin-1": ROWS.encode("latin-1"),
    "GB18030": ROWS.replace("naïve Texte", "这家店的东西很好吃")
    .replace("ü", "文")
    .encode("gb18030"),
}
ODD = {
    "gzip bomb": BOMB,
    "gzip of a gzip bomb": gzip.compress(BOMB),
    "bzip2": bz2.compress(ROWS.encode()),
    "xz": lzma.compress(ROWS.encode()),
    "EBCDIC": ROWS.encode("cp500"),
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00cbuiltins\neval\n.",
    "Parquet without an end": b"PAR1" + bytes(100),
}


def upload(client: TestClient, content: bytes, *, format: str | None, **headers: str) -> Response:
    form = {"heads": '[{"name": "mood"}]'} | ({"format": format} if format else {})
    return client.post(
        "/datasets", files={"file": ("a.jsonl", content)}, data=form, headers=headers
    )


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_unreadable_uploads_are_rejected(platform: Platform, format: str) -> None:
    client = platform.client()
    for kind, content in ODD.items():
        response = upload(client, content, format=format)
        assert response.status_code == 422, kind
        assert response.json()["type"] == "urn:stillhouse:problem:invalid-dataset"
        assert len(response.content) < 20_000
    assert list(platform.settings.datasets_dir.iterdir()) == []
    assert list(platform.settings.uploads_dir.iterdir()) == []


@pytest.mark.parametrize("kind", READABLE)
def test_compressed_and_encoded_uploads_are_read(platform: Platform, kind: str) -> None:
    response = upload(platform.client(), READABLE[kind], format=None)
    assert response.status_code == 201
    assert sum(response.json()["rows"].values()) == 40
    assert list(platform.settings.uploads_dir.iterdir()) == []


def test_a_compressed_body_is_never_decompressed(platform: Platform) -> None:
    """`Content-Encoding` would let a decompression bomb bypass the body limit."""
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    client = platform.client()
    for path in ("/datasets", "/jobs", "/predict", "/diagnoses"):
        response = client.post(path, content=BOMB, headers=headers)
        assert response.status_code in (400, 422)
        assert response.headers["content-type"] == "application/problem+json"
