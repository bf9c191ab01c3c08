"""Reads an upload in a process with limits, which the API can end.

A Parquet file of a kilobyte may hold a text of a gigabyte, or a list of a billion nulls, and its metadata
may lie about that; so may a workbook or an archive, and a text of tiny rows takes a hundred times its size
in memory. The libraries do not bound what they allocate, so the kernel must: the calling process survives,
and the upload is rejected.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import BaseModel

from services.shared.datasets.card import DatasetCard
from services.shared.datasets.ingest import ingest, unpacking_dir
from services.shared.datasets.preview import Preview, preview
from services.shared.datasets.upload import DatasetRejected, Fault, Format, Layout
from services.shared.files.atomic_write import PARTIAL
from services.shared.sandbox.errors import LimitExceeded, SandboxError
from services.shared.sandbox.sandbox import Sandbox


class Upload(BaseModel):
    """An upload to be read, and under which name it is to be stored."""

    path: Path
    format: Format | None
    layout: Layout
    filename: str
    # Of a dataset to be stored; without them the upload is previewed.
    id: str = ""
    name: str = ""
    datasets_dir: Path | None = None


class Answer(BaseModel):
    """What reading an upload returned or raised: a result, faults, or an OSError."""

    card: DatasetCard | None = None
    preview: Preview | None = None
    faults: list[Fault] = []
    total: int = 0
    found: str = ""
    command: str = ""
    errno: int | None = None
    message: str = ""


def ingest_in_sandbox(
    sandbox: Sandbox,
    upload: Path,
    *,
    format: Format | None = None,
    layout: Layout,
    id: str,
    name: str,
    datasets_dir: Path,
    filename: str = "FILE",
) -> DatasetCard:
    """Call `ingest` in a sandbox.

    Raises DatasetRejected, also where a limit was exceeded; OSError from the disk; and SandboxError where
    the call failed for any other reason.
    """
    request = Upload(
        path=upload.absolute(),
        format=format,
        layout=_plain_layout(layout),
        filename=filename,
        id=id,
        name=name,
        datasets_dir=datasets_dir.absolute(),
    )
    try:
        answer = _answer(sandbox, request)
    except (DatasetRejected, SandboxError):
        for staging in datasets_dir.glob(f".{id}.*{PARTIAL}"):
            shutil.rmtree(staging, ignore_errors=True)
        raise
    assert answer.card is not None
    return answer.card


def preview_in_sandbox(
    sandbox: Sandbox,
    upload: Path,
    *,
    format: Format | None = None,
    layout: Layout,
    filename: str = "FILE",
) -> Preview:
    """Call `preview` in a sandbox; raises as `ingest_in_sandbox` does."""
    request = Upload(
        path=upload.absolute(), format=format, layout=_plain_layout(layout), filename=filename
    )
    answer = _answer(sandbox, request)
    assert answer.preview is not None
    return answer.preview


def _plain_layout(layout: Layout) -> Layout:
    """Return the layout without the fields of the form that it may be a part of."""
    return Layout.model_validate(layout.model_dump(include=set(Layout.model_fields)))


def _answer(sandbox: Sandbox, upload: Upload) -> Answer:
    try:
        answer = sandbox.run(read_upload, upload)
    except SandboxError as error:
        shutil.rmtree(unpacking_dir(upload.path), ignore_errors=True)
        if not isinstance(error, LimitExceeded):
            raise
        message = f"cannot be read: it {error}; send it as JSONL, or in parts"
        raise DatasetRejected([Fault(line=None, field=None, message=message)], 1) from error
    if answer.errno is not None:
        raise OSError(answer.errno, answer.message)
    if answer.card is None and answer.preview is None:
        raise DatasetRejected(
            answer.faults, answer.total, found=answer.found, command=answer.command
        )
    return answer


def read_upload(upload: Upload) -> Answer:
    """Store or preview an upload."""
    try:
        if upload.datasets_dir is None:
            return Answer(preview=_preview(upload))
        return Answer(card=_ingest(upload, upload.datasets_dir))
    except DatasetRejected as rejected:
        return Answer(
            faults=rejected.faults,
            total=rejected.total,
            found=rejected.found,
            command=rejected.command,
        )
    except OSError as error:
        if error.errno is None:
            raise
        return Answer(errno=error.errno, message=error.strerror or "")


def _preview(upload: Upload) -> Preview:
    return preview(
        upload.path, format=upload.format, layout=upload.layout, filename=upload.filename
    )


def _ingest(upload: Upload, datasets_dir: Path) -> DatasetCard:
    return ingest(
        upload.path,
        format=upload.format,
        layout=upload.layout,
        id=upload.id,
        name=upload.name,
        datasets_dir=datasets_dir,
        filename=upload.filename,
    )
