"""The console's page at `/`, and its files below `/console/`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.api.console_files import CONTENT_SECURITY_POLICY, ConsoleFile, console_files

router = APIRouter(include_in_schema=False)

_FOR_EVER = "public, max-age=31536000, immutable"


@router.api_route("/", methods=["GET", "HEAD"])
def page(request: Request) -> Response:
    """Return the page, or 304 where the browser has it."""
    return _respond(console_files().page, request=request, caching="no-cache")


@router.api_route("/console/{version}/{path:path}", methods=["GET", "HEAD"])
def file(version: str, path: str, request: Request) -> Response:
    """Return a file of this version of the console; of another version nothing."""
    console = console_files()
    found = console.files.get(path)
    if version != console.version or found is None:
        raise HTTPException(404)
    return _respond(found, request=request, caching=_FOR_EVER)


def _respond(file: ConsoleFile, *, request: Request, caching: str) -> Response:
    headers = {
        "Cache-Control": caching,
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "ETag": file.etag,
        "Vary": "Accept-Encoding",
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    content = file.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        content = file.compressed
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type=file.media_type)
