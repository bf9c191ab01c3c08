"""The files of the console: read, compressed and named by their content once, then served from memory.

Their paths contain a digest of all of them, so that a browser may keep them for ever and a new version is
never mixed with an old one; relative imports stay below it. Only the page itself, at `/`, is asked for again.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

DIRECTORY = Path(__file__).parent / "console"
PAGE = "index.html"
_ENTRY = "main.js"
_FIRST_PAGE = "pages/jobs.js"  # what `/` shows, loaded on demand
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    "": "text/plain; charset=utf-8",
}
_IMPORT = re.compile(r"""(?:^|;)\s*(?:import|export)\b[^"';]*["'](\.[^"']+)["']""", re.MULTILINE)

# No inline script, no inline style, no eval, nothing from elsewhere. Trusted Types: only lit-html may make
# markup of a string, and its strings are the constant parts of templates; `uplot` is the URL of one script.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types lit-html uplot",
    )
)


@dataclass(frozen=True)
class ConsoleFile:
    """One file as it is sent."""

    content: bytes
    compressed: bytes
    media_type: str
    etag: str


@dataclass(frozen=True)
class ConsoleFiles:
    """All files by their path below the version, and the page that starts them."""

    version: str
    files: dict[str, ConsoleFile]
    page: ConsoleFile


@lru_cache(maxsize=1)
def console_files() -> ConsoleFiles:
    """Return the files of the console. Raises OSError where they are not installed."""
    contents = {
        path.relative_to(DIRECTORY).as_posix(): path.read_bytes()
        for path in sorted(DIRECTORY.rglob("*"))
        if path.is_file() and path.suffix in _MEDIA_TYPES
    }
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    version = digest.hexdigest()[:12]
    page = _page(contents.pop(PAGE).decode(), version=version, contents=contents)
    return ConsoleFiles(
        version=version,
        files={name: _file(name, content) for name, content in contents.items()},
        page=_file(PAGE, page),
    )


def static_imports(name: str, contents: dict[str, bytes]) -> list[str]:
    """Return a module and all that it imports statically, each once, the module first."""
    found = [name]
    for each in found:
        for target in _IMPORT.findall(contents[each].decode()):
            path = _joined(PurePosixPath(each).parent, target)
            if path not in found:
                found.append(path)
    return found


def _page(template: str, *, version: str, contents: dict[str, bytes]) -> bytes:
    """Return the page with its version, and with a hint for each module of the first view."""
    first = dict.fromkeys(
        [*static_imports(_ENTRY, contents), *static_imports(_FIRST_PAGE, contents)]
    )
    hints = "\n".join(f'<link rel="modulepreload" href="/console/{version}/{n}">' for n in first)
    return template.replace("<!-- modules -->", hints).replace("VERSION", version).encode()


def _joined(directory: PurePosixPath, target: str) -> str:
    parts: list[str] = list(directory.parts)
    for part in PurePosixPath(target).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def _file(name: str, content: bytes) -> ConsoleFile:
    return ConsoleFile(
        content=content,
        compressed=gzip.compress(content, 9, mtime=0),
        media_type=_MEDIA_TYPES[PurePosixPath(name).suffix],
        etag=f'"{hashlib.sha256(content).hexdigest()[:16]}"',
    )
