"""Decompression of uploads into a file of bounded size."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from pathlib import Path
from typing import Protocol

import zstandard

from services.shared.datasets.upload import DatasetRejected, Fault

MAX_UNPACKED_BYTES = 4 * 2**30
MAX_ARCHIVE_MEMBERS = 500_000
_MAX_RATIO = 1000  # of a kind of text that compresses best; a bomb has more
_MIN_BOMB_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


def decompress(path: Path, target: Path, *, kind: str) -> None:
    """Write the content of a gzip or zstd file to `target`. Raises DatasetRejected."""
    try:
        with path.open("rb") as file:
            if kind == "gzip":
                stream: _Readable = gzip.GzipFile(fileobj=file)
            else:
                decompressor = zstandard.ZstdDecompressor(max_window_size=2**27)
                stream = decompressor.stream_reader(file, read_across_frames=True)
            _copy(stream, target, compressed_bytes=path.stat().st_size)
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise _rejected(f"is not a readable {kind} file: {str(error)[:200]}") from error


def unzip(path: Path, directory: Path) -> None:
    """Unpack an archive into `directory`, ignoring hidden files. Raises DatasetRejected."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if _is_content(info)]
            if len(members) > MAX_ARCHIVE_MEMBERS:
                raise _rejected(f"the archive has more than {MAX_ARCHIVE_MEMBERS:,} files")
            remaining = _limit(path.stat().st_size)
            for info in members:
                target = directory / _safe_name(info.filename)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as stream:
                    remaining -= _copy(stream, target, limit=remaining)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        # NotImplementedError: an unknown method; RuntimeError: an encrypted member
        raise _rejected(f"is not a readable zip archive: {str(error)[:200]}") from error


def _is_content(info: zipfile.ZipInfo) -> bool:
    parts = info.filename.split("/")
    hidden = any(p.startswith((".", "__MACOSX")) and p != ".." for p in parts)
    return not info.is_dir() and not hidden


def _safe_name(name: str) -> str:
    parts = [part for part in name.replace("\\", "/").split("/") if part]
    if name.startswith("/") or ".." in parts or not parts or "\x00" in name or len(name) > 1000:
        raise _rejected(f"the archive holds an unsafe path: {name[:100]!r}")
    return "/".join(parts)


def _limit(compressed_bytes: int) -> int:
    return min(MAX_UNPACKED_BYTES, max(_MIN_BOMB_BYTES, compressed_bytes * _MAX_RATIO))


def _copy(
    stream: _Readable, target: Path, *, compressed_bytes: int = 0, limit: int | None = None
) -> int:
    """Copy a stream and return its size. Raises DatasetRejected beyond the limit."""
    limit = _limit(compressed_bytes) if limit is None else limit
    written = 0
    with target.open("wb") as file:
        while chunk := stream.read(_CHUNK_BYTES):
            written += len(chunk)
            if written > limit:
                raise _rejected(
                    f"decompresses to more than {limit:,} bytes; send it in parts or as Parquet"
                )
            file.write(chunk)
    return written


def _rejected(message: str) -> DatasetRejected:
    return DatasetRejected([Fault(line=None, field=None, message=message)], 1)
