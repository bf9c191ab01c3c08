"""The files of a model's artifact, for programs that cannot read the data directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict
from starlette.responses import FileResponse
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from services.api.auth.callers import requires
from services.api.auth.keys import Scope
from services.api.deps import CallerDep, ContextDep, ModelId, StoreDep
from services.api.event_streams import StreamLimiter
from services.api.openapi import problems
from services.shared.files.hashing import file_sha256
from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.jobs.errors import NotFound

router = APIRouter(
    tags=["models"],
    dependencies=[Depends(requires(Scope.READ))],
    responses=problems(401, 403, 404, 409, 422, 429, 500, 503),
)

_OCTETS = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


class ModelFile(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True)

    name: str  # relative to the artifact
    size_bytes: int
    sha256: str


class ModelFiles(BaseModel):
    """All files of an artifact; the manifest comes last."""

    items: list[ModelFile]


@router.get("/models/{model_id}/files", operation_id="list_model_files")
def list_model_files(model_id: ModelId, store: StoreDep) -> ModelFiles:
    """List the files of a model's artifact with their sizes and SHA-256 sums."""
    directory = store.model(model_id).path
    sums = _sums(directory, model_id) | {MANIFEST: file_sha256(directory / MANIFEST)}
    return ModelFiles(
        items=[
            ModelFile(name=name, size_bytes=(directory / name).stat().st_size, sha256=sha256)
            for name, sha256 in sums.items()
            if (directory / name).is_file()
        ]
    )


@router.get(
    "/models/{model_id}/files/{name:path}",
    operation_id="download_model_file",
    response_class=FileResponse,
    responses={200: {"description": "The file; `Range` is understood.", "content": _OCTETS}},
)
def download_model_file(
    model_id: ModelId,
    name: Annotated[str, PathParameter(max_length=300, description="As listed.")],
    context: ContextDep,
    store: StoreDep,
    caller: CallerDep,
) -> FileResponse:
    """Download one file of a model's artifact."""
    directory = store.model(model_id).path
    # Only what the manifest names: no `..` and no link leads out.
    if name != MANIFEST and name not in _sums(directory, model_id):
        raise NotFound("model file", name)
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()) or not path.is_file():
        raise NotFound("model file", name)
    context.download_limiter.check(caller.id)
    return _Download(path, limiter=context.download_limiter, caller=caller.id)


class _Download(FileResponse):
    """A file, read in small parts as the client takes them, and counted until it is sent."""

    def __init__(self, path: Path, *, limiter: StreamLimiter, caller: str) -> None:
        super().__init__(path, media_type="application/octet-stream", filename=path.name)
        self._limiter = limiter
        self._caller = caller

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        with self._limiter.stream(self._caller):
            await super().__call__(scope, receive, send)


def _sums(directory: Path, model_id: str) -> dict[str, str]:
    """Return the SHA-256 of each file by name. Raises NotFound where the artifact is gone."""
    try:
        sums: dict[str, str] = json.loads((directory / MANIFEST).read_bytes()).get("files", {})
    except (OSError, ValueError) as error:
        raise NotFound("artifact of model", model_id) from error
    return sums
