"""Reads an upload in a subprocess with resource limits.

A Parquet file of a kilobyte may hold a text of a gigabyte, or a list of a billion nulls, and its metadata
may lie about that; so may a workbook or an archive. The libraries do not bound what they allocate, so the
kernel must: the calling process survives, and the upload is rejected. A small text file is read in the
calling process (`is_small_text`): its lines are bounded, and a subprocess takes half a second to start.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from services.shared.datasets.card import DatasetCard
from services.shared.datasets.formats.source import binary_kind
from services.shared.datasets.ingest import ingest, unpacking_dir
from services.shared.datasets.preview import Preview, preview
from services.shared.datasets.upload import DatasetRejected, Fault, Format, Layout
from services.shared.files.atomic_write import PARTIAL

_CPU_SECONDS = 3600
# An exit code of our own; a process that is killed, or aborts within Arrow, has a negative one.
_EXIT_OUT_OF_MEMORY = 3
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_SMALL_BYTES = 4 * 2**20


class _Request(BaseModel):
    """What the subprocess reads from its standard input."""

    upload: Path
    format: Format | None
    layout: Layout
    filename: str
    memory_bytes: int
    # Of a dataset to be stored; without them the upload is previewed.
    id: str = ""
    name: str = ""
    datasets_dir: Path | None = None


class _Response(BaseModel):
    """What the subprocess writes to its standard output: a result, faults, or an OSError."""

    card: DatasetCard | None = None
    preview: Preview | None = None
    faults: list[Fault] = []
    total: int = 0
    found: str = ""
    command: str = ""
    errno: int | None = None
    message: str = ""


def is_small_text(upload: Path) -> bool:
    """Return whether an upload is text of a few megabytes, which is read safely without a subprocess."""
    try:
        return upload.stat().st_size <= _SMALL_BYTES and binary_kind(upload) is None
    except DatasetRejected:
        return True  # it is rejected again, before anything of it is read


def ingest_in_sandbox(
    upload: Path,
    *,
    format: Format | None = None,
    layout: Layout,
    id: str,
    name: str,
    datasets_dir: Path,
    memory_bytes: int,
    filename: str = "FILE",
) -> DatasetCard:
    """Call `ingest` in a subprocess whose address space is limited to `memory_bytes`.

    Raises DatasetRejected, also where the limit was exceeded; OSError from the disk; and RuntimeError
    with the last line of standard error where the subprocess failed for any other reason.
    """
    request = _Request(
        upload=upload.absolute(),
        format=format,
        layout=_plain_layout(layout),
        filename=filename,
        memory_bytes=memory_bytes,
        id=id,
        name=name,
        datasets_dir=datasets_dir.absolute(),
    )
    try:
        response = _respond(request)
    except (DatasetRejected, RuntimeError):
        for staging in datasets_dir.glob(f".{id}.*{PARTIAL}"):
            shutil.rmtree(staging, ignore_errors=True)
        raise
    assert response.card is not None
    return response.card


def preview_in_sandbox(
    upload: Path,
    *,
    format: Format | None = None,
    layout: Layout,
    memory_bytes: int,
    filename: str = "FILE",
) -> Preview:
    """Call `preview` in a subprocess; raises as `ingest_in_sandbox` does."""
    request = _Request(
        upload=upload.absolute(),
        format=format,
        layout=_plain_layout(layout),
        filename=filename,
        memory_bytes=memory_bytes,
    )
    response = _respond(request)
    assert response.preview is not None
    return response.preview


def _plain_layout(layout: Layout) -> Layout:
    """Return the layout without the fields of the form that it may be a part of."""
    return Layout.model_validate(layout.model_dump(include=set(Layout.model_fields)))


def _respond(request: _Request) -> _Response:
    process = _run(request)
    if process.returncode != 0:
        shutil.rmtree(unpacking_dir(request.upload), ignore_errors=True)
        raise _failure(process, request.memory_bytes)
    response = _Response.model_validate_json(process.stdout)
    if response.errno is not None:
        raise OSError(response.errno, response.message)
    if response.card is None and response.preview is None:
        raise DatasetRejected(
            response.faults, response.total, found=response.found, command=response.command
        )
    return response


def _run(request: _Request) -> subprocess.CompletedProcess[bytes]:
    # The upload is untrusted: the subprocess gets no credentials, and no threads that it would not use.
    env = {k: v for k, v in os.environ.items() if not k.startswith("STILLHOUSE_")}
    return subprocess.run(
        [sys.executable, "-m", "services.shared.datasets.sandbox"],
        input=request.model_dump_json().encode(),
        capture_output=True,
        check=False,
        cwd=Path(__file__).resolve().parents[3],  # where `services` is importable
        env=env | {"OMP_NUM_THREADS": "1"},
    )


def _failure(process: subprocess.CompletedProcess[bytes], memory_bytes: int) -> Exception:
    if process.returncode > 0 and process.returncode != _EXIT_OUT_OF_MEMORY:
        last_line = process.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return RuntimeError(f"the subprocess that reads an upload failed: {last_line}")
    message = (
        f"cannot be read within {memory_bytes:,} bytes of memory; send it as JSONL, or in parts"
    )
    return DatasetRejected([Fault(line=None, field=None, message=message)], 1)


def main() -> None:
    """Read the upload named on standard input; a process that exceeds its limits writes nothing."""
    request = _Request.model_validate_json(sys.stdin.buffer.read())
    _apply_limits(request.memory_bytes)
    try:
        response = _read(request)
    except DatasetRejected as rejected:
        response = _Response(
            faults=rejected.faults,
            total=rejected.total,
            found=rejected.found,
            command=rejected.command,
        )
    except MemoryError:
        sys.exit(_EXIT_OUT_OF_MEMORY)
    except OSError as error:
        if error.errno is None:
            raise
        response = _Response(errno=error.errno, message=error.strerror or "")
    sys.stdout.write(response.model_dump_json())


def _read(request: _Request) -> _Response:
    if request.datasets_dir is None:
        shown = preview(
            request.upload,
            format=request.format,
            layout=request.layout,
            filename=request.filename,
        )
        return _Response(preview=shown)
    card = ingest(
        request.upload,
        format=request.format,
        layout=request.layout,
        id=request.id,
        name=request.name,
        datasets_dir=request.datasets_dir,
        filename=request.filename,
    )
    return _Response(card=card)


def _apply_limits(memory_bytes: int) -> None:
    _set_limit(resource.RLIMIT_AS, memory_bytes)
    _set_limit(resource.RLIMIT_CPU, _CPU_SECONDS)
    _set_limit(resource.RLIMIT_CORE, 0)
    if (
        _OOM_SCORE.exists()
    ):  # if the host runs out of memory anyway, the kernel kills this process first
        _OOM_SCORE.write_text("1000")


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]  # only root may raise it
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main()
