"""Datasets: upload in one request, validation row by row, atomic storage."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from services.api.auth.callers import authenticate, requires
from services.api.auth.keys import Scope
from services.api.deps import (
    AppContext,
    CallerDep,
    ContextDep,
    Cursor,
    DatasetId,
    Deleted,
    LifecycleDep,
    Limit,
    StoreDep,
)
from services.api.limits.body import text_fault
from services.api.limits.spool import spooled
from services.api.openapi import links, problems
from services.api.problems import ProblemError, invalid_field
from services.shared.datasets.preview import Preview
from services.shared.datasets.sandbox import ingest_in_sandbox, preview_in_sandbox
from services.shared.datasets.statistics import DatasetStatistics
from services.shared.datasets.upload import Format, Layout
from services.shared.files.directory_size import directory_bytes
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import NotFound
from services.shared.jobs.ids import new_id
from services.shared.jobs.lifecycle.disk import full_disk_for_uploads
from services.shared.jobs.views import DatasetView, DeletionView, Page

router = APIRouter(tags=["datasets"], responses=problems(401, 422, 429, 500, 503))

T = TypeVar("T")

MAX_FIELDS = 32
MAX_FIELD_BYTES = 1024 * 1024  # the names of 10,000 labels
_JSON_FIELDS = ("heads", "fractions", "label_names", "missing_labels")


def _with_file(schema: dict[str, Any]) -> None:
    schema["required"] = ["file"]
    schema["properties"]["file"] = {
        "type": "string",
        "format": "binary",
        "description": "A table of texts in any format of docs/datasets.md.",
    }


class DatasetForm(Layout):
    """The multipart form of an upload; `heads`, `fractions` and what is a list or a map are JSON."""

    model_config = ConfigDict(json_schema_extra=_with_file)

    name: Annotated[str, Field(min_length=1, max_length=120)] | None = Field(
        None, description="Defaults to the file name."
    )
    format: Format | None = Field(None, description="Detected from the content by default.")


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
async def create_dataset(
    request: Request, context: ContextDep, store: StoreDep, response: Response
) -> DatasetView:
    """Validate an upload row by row and store it; every error names its line."""
    await run_in_threadpool(_check_room, store, _content_bytes(request))
    stored = await _receive(request, context, partial(_store, store=store))
    response.headers["Location"] = f"/datasets/{stored.id}"
    return stored


@router.post(
    "/datasets/preview",
    operation_id="preview_dataset",
    dependencies=[Depends(requires(Scope.SUBMIT))],
    openapi_extra=_FORM,
    responses=problems(400, 403, 413, 507),
)
async def preview_dataset(request: Request, context: ContextDep) -> Preview:
    """Show how an upload would be read; nothing is stored."""
    return await _receive(request, context, _preview)


def _check_room(store: Store, more_bytes: int) -> None:
    """Refuse an upload for which its key or the disk has no room. Raises ProblemError."""
    why = full_disk_for_uploads(store.settings)
    if why is not None:
        raise ProblemError("disk-full", f"No upload is accepted: {why}.")
    LifecycleStore(store).check_storage(more_bytes=more_bytes)


def _content_bytes(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0


@router.get("/datasets", operation_id="list_datasets", dependencies=[Depends(requires(Scope.READ))])
def list_datasets(
    store: StoreDep, deleted: Deleted = False, cursor: Cursor = None, limit: Limit = 50
) -> Page[DatasetView]:
    """List datasets, newest first."""
    return store.list_datasets(deleted=deleted, cursor=cursor, limit=limit)


@router.get(
    "/datasets/{dataset_id}",
    operation_id="get_dataset",
    dependencies=[Depends(requires(Scope.READ))],
    responses=problems(404),
)
def get_dataset(dataset_id: DatasetId, store: StoreDep) -> DatasetView:
    """Show a dataset: heads and their labels, rows of each split, warnings."""
    return store.dataset(dataset_id)


@router.get(
    "/datasets/{dataset_id}/statistics",
    operation_id="get_dataset_statistics",
    dependencies=[Depends(requires(Scope.READ))],
    responses=problems(404),
)
def get_dataset_statistics(
    dataset_id: DatasetId, store: StoreDep, context: ContextDep
) -> DatasetStatistics:
    """Show labels of each split, a histogram of lengths, and the first rows of each split."""
    card = store.dataset(dataset_id)
    try:
        return context.dataset_statistics.of(card)
    except FileNotFoundError as error:
        raise NotFound("files of the dataset", dataset_id) from error


@router.delete(
    "/datasets/{dataset_id}",
    operation_id="delete_dataset",
    dependencies=[Depends(requires(Scope.SUBMIT))],
    responses=problems(403, 404, 409),
)
def delete_dataset(
    dataset_id: DatasetId, lifecycle: LifecycleDep, caller: CallerDep
) -> DeletionView:
    """Delete a dataset that no unfinished job uses; it can be restored until `gone_after`."""
    return lifecycle.delete("dataset", dataset_id, by=caller.name)


@router.post(
    "/datasets/{dataset_id}/restore",
    operation_id="restore_dataset",
    dependencies=[Depends(requires(Scope.SUBMIT))],
    responses=problems(403, 404, 409),
)
def restore_dataset(dataset_id: DatasetId, lifecycle: LifecycleDep, store: StoreDep) -> DatasetView:
    """Undo the deletion of a dataset."""
    lifecycle.restore("dataset", dataset_id)
    return store.dataset(dataset_id)


async def _receive(
    request: Request, context: AppContext, use: Callable[[UploadFile, DatasetForm, AppContext], T]
) -> T:
    """Receive the form and return what `use` makes of it in a thread."""
    try:
        # Parse the form here, after the scope check: the framework would parse it before.
        async with (
            context.upload_limiter.upload(authenticate(request).id),
            request.form(
                max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES
            ) as fields,
        ):
            file = fields.get("file")
            if not isinstance(file, UploadFile):
                raise invalid_field("file", "Send the dataset as `file` in a multipart form.")
            form = _parse_form(fields)
            async with context.upload_limiter.validation():
                return await run_in_threadpool(use, file, form, context)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ProblemError("disk-full", "The server has no disk space for this upload.") from error


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


def _store(
    file: UploadFile, form: DatasetForm, context: AppContext, *, store: Store
) -> DatasetView:
    filename = file.filename or ""
    dataset_id = new_id("ds")
    name = form.name or PurePath(filename).stem[:120] or dataset_id
    if fault := text_fault(name):
        raise invalid_field("file", f"The file name {fault}; give a `name`.")
    settings = context.settings
    with spooled(file.file, settings.uploads_dir) as upload:
        card = ingest_in_sandbox(
            context.sandboxes.validations,
            upload,
            format=form.format,
            layout=form,
            id=dataset_id,
            name=name,
            datasets_dir=settings.datasets_dir,
            filename=_shown_name(filename),
        )
    try:
        size_bytes = directory_bytes(settings.dataset_dir(dataset_id))
        LifecycleStore(store).check_storage(more_bytes=size_bytes)
        return store.add_dataset(card, size_bytes=size_bytes)
    except BaseException:
        shutil.rmtree(settings.dataset_dir(dataset_id), ignore_errors=True)
        raise


def _preview(file: UploadFile, form: DatasetForm, context: AppContext) -> Preview:
    filename = _shown_name(file.filename or "")
    with spooled(file.file, context.settings.uploads_dir) as upload:
        return preview_in_sandbox(
            context.sandboxes.validations,
            upload,
            format=form.format,
            layout=form,
            filename=filename,
        )


def _shown_name(filename: str) -> str:
    """Return the file name for the command in a message."""
    name = PurePath(filename).name[:200]
    return "FILE" if not name or text_fault(name) else name
