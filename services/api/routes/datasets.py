"""Datasets: upload in one request, validation row by row, atomic storage."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from pathlib import Path, PurePath
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from services.api.auth.keys import Scope, requires
from services.api.deps import AppContext, ContextDep, Cursor, DatasetId, Limit
from services.api.limits.body import text_fault
from services.api.openapi import links, problems
from services.api.problems import ProblemError, invalid_field
from services.api.settings import ApiSettings
from services.shared.datasets.card import DatasetCard
from services.shared.datasets.ingest import ingest
from services.shared.datasets.sandbox import ingest_in_sandbox
from services.shared.datasets.upload import Format, Layout, format_from_filename
from services.shared.jobs.ids import new_id
from services.shared.jobs.views import DatasetView, Page

router = APIRouter(tags=["datasets"], responses=problems(401, 422, 429, 500, 503))

MAX_FIELDS = 16
MAX_FIELD_BYTES = 64 * 1024
_JSON_FIELDS = ("heads", "fractions")


def _with_file(schema: dict[str, Any]) -> None:
    schema["required"] = ["file"]
    schema["properties"]["file"] = {
        "type": "string",
        "format": "binary",
        "description": "JSONL or CSV in UTF-8, or Parquet.",
    }


class DatasetForm(Layout):
    """The multipart form of an upload; `heads` and `fractions` are JSON."""

    model_config = ConfigDict(json_schema_extra=_with_file)

    name: Annotated[str, Field(min_length=1, max_length=120)] | None = Field(
        None, description="Defaults to the file name."
    )
    format: Format | None = Field(None, description="Defaults to the file extension.")


_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {"$ref": "#/components/schemas/DatasetForm"},
                "encoding": {name: {"contentType": "application/json"} for name in _JSON_FIELDS},
            }
        },
    }
}


@router.post(
    "/datasets",
    operation_id="create_dataset",
    status_code=201,
    dependencies=[Depends(requires(Scope.SUBMIT))],
    openapi_extra=_FORM,
    responses={
        201: {
            "headers": {"Location": {"schema": {"type": "string"}, "description": "The dataset."}},
            "links": links("dataset_id", "get_dataset"),
        },
        **problems(400, 403, 413, 507),
    },
)
async def create_dataset(request: Request, context: ContextDep, response: Response) -> DatasetView:
    """Validate an upload row by row and store it; every error names its line."""
    try:
        async with context.upload_limiter.upload():
            stored = await _receive(request, context)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ProblemError("disk-full", "The server has no disk space for this upload.") from error
    response.headers["Location"] = f"/datasets/{stored.id}"
    return stored


@router.get("/datasets", operation_id="list_datasets", dependencies=[Depends(requires(None))])
def list_datasets(
    context: ContextDep, cursor: Cursor = None, limit: Limit = 50
) -> Page[DatasetView]:
    """List datasets, newest first."""
    return context.store.list_datasets(cursor=cursor, limit=limit)


@router.get(
    "/datasets/{dataset_id}",
    operation_id="get_dataset",
    dependencies=[Depends(requires(None))],
    responses=problems(404),
)
def get_dataset(dataset_id: DatasetId, context: ContextDep) -> DatasetView:
    """Show a dataset: heads and their labels, rows of each split, warnings."""
    return context.store.dataset(dataset_id)


async def _receive(request: Request, context: AppContext) -> DatasetView:
    # Parse the form here, after the scope check: the framework would parse it before.
    async with request.form(
        max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES
    ) as fields:
        file = fields.get("file")
        if not isinstance(file, UploadFile):
            raise invalid_field("file", "Send the dataset as `file` in a multipart form.")
        form = _parse_form(fields)
        async with context.upload_limiter.validation():
            return await run_in_threadpool(_store, file, form, context=context)


def _parse_form(fields: FormData) -> DatasetForm:
    values: dict[str, Any] = {}
    for field, value in fields.items():
        if field == "file":
            continue
        if not isinstance(value, str):
            raise invalid_field(field[:80], "Only the field `file` may be a file.")
        if fault := text_fault(field + value):
            raise invalid_field(field[:80], f"The field {fault}.")
        values[field] = _parse_json(field, value) if field in _JSON_FIELDS else value
    try:
        return DatasetForm.model_validate(values)
    except ValidationError as error:
        errors = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
        raise RequestValidationError(errors, body=values) from error


def _parse_json(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_field(field, f"The field is not valid JSON: {error}") from error


def _store(file: UploadFile, form: DatasetForm, *, context: AppContext) -> DatasetView:
    filename = file.filename or ""
    try:
        format = form.format or format_from_filename(filename)
    except ValueError as error:
        raise invalid_field("file", str(error)) from error
    dataset_id = new_id("ds")
    name = form.name or PurePath(filename).stem[:120] or dataset_id
    if fault := text_fault(name):
        raise invalid_field("file", f"The file name {fault}; give a `name`.")
    settings = context.settings
    with tempfile.NamedTemporaryFile(dir=settings.uploads_dir, suffix=f".{format}") as copy:
        shutil.copyfileobj(file.file, copy, 1024 * 1024)
        copy.flush()
        card = _ingest(
            Path(copy.name), format=format, layout=form, id=dataset_id, name=name, settings=settings
        )
    try:
        return context.store.add_dataset(card)
    except BaseException:
        shutil.rmtree(settings.dataset_dir(dataset_id), ignore_errors=True)
        raise


def _ingest(
    upload: Path, *, format: Format, layout: Layout, id: str, name: str, settings: ApiSettings
) -> DatasetCard:
    directory = settings.datasets_dir
    if format is not Format.PARQUET:
        return ingest(
            upload, format=format, layout=layout, id=id, name=name, datasets_dir=directory
        )
    return ingest_in_sandbox(
        upload,
        format=format,
        layout=layout,
        id=id,
        name=name,
        datasets_dir=directory,
        memory_bytes=settings.validation_memory_bytes,
    )
