"""Ingests an upload in a subprocess with resource limits, for formats that decompress.

A Parquet file of a kilobyte may hold a text of a gigabyte, or a list of a billion nulls, and its metadata
may lie about that. Arrow does not bound what it allocates, so the kernel must: the calling process
survives, and the upload is rejected. (JSONL and CSV are read line by line, and no line is longer than
MAX_LINE_BYTES, so they need no subprocess.)
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
from services.shared.datasets.ingest import ingest
from services.shared.datasets.upload import DatasetRejected, Fault, Format, Layout
from services.shared.files.atomic_write import PARTIAL

_CPU_SECONDS = 3600
# An exit code of our own; a process that is killed, or aborts within Arrow, has a negative one.
_EXIT_OUT_OF_MEMORY = 3
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class _Request(BaseModel):
    """What the subprocess reads from its standard input."""

    upload: Path
    format: Format
    layout: Layout
    id: str
    name: str
    datasets_dir: Path
    memory_bytes: int


class _Response(BaseModel):
    """What the subprocess writes to its standard output: a card, faults, or an OSError."""

    card: DatasetCard | None = None
    faults: list[Fault] = []
    total: int = 0
    errno: int | None = None
    message: str = ""


def ingest_in_sandbox(
    upload: Path,
    *,
    format: Format,
    layout: Layout,
    id: str,
    name: str,
    datasets_dir: Path,
    memory_bytes: int,
) -> DatasetCard:
    """Call `ingest` in a subprocess whose address space is limited to `memory_bytes`.

    Raises DatasetRejected, also where the limit was exceeded; OSError from the disk; and RuntimeError
    with the last line of standard error where the subprocess failed for any other reason.
    """
    request = _Request(
        upload=upload.absolute(),
        format=format,
        layout=Layout.model_validate(layout.model_dump(include=set(Layout.model_fields))),
        id=id,
        name=name,
        datasets_dir=datasets_dir.absolute(),
        memory_bytes=memory_bytes,
    )
    process = _run(request)
    if process.returncode != 0:
        for staging in datasets_dir.glob(f".{id}.*{PARTIAL}"):
            shutil.rmtree(staging, ignore_errors=True)
        raise _failure(process, memory_bytes)
    response = _Response.model_validate_json(process.stdout)
    if response.card is not None:
        return response.card
    if response.errno is not None:
        raise OSError(response.errno, response.message)
    raise DatasetRejected(response.faults, response.total)


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
    """Ingest the upload named on standard input; a process that exceeds its limits writes nothing."""
    request = _Request.model_validate_json(sys.stdin.buffer.read())
    _apply_limits(request.memory_bytes)
    try:
        card = ingest(
            request.upload,
            format=request.format,
            layout=request.layout,
            id=request.id,
            name=request.name,
            datasets_dir=request.datasets_dir,
        )
        response = _Response(card=card)
    except DatasetRejected as rejected:
        response = _Response(faults=rejected.faults, total=rejected.total)
    except MemoryError:
        sys.exit(_EXIT_OUT_OF_MEMORY)
    except OSError as error:
        if error.errno is None:
            raise
        response = _Response(errno=error.errno, message=error.strerror or "")
    sys.stdout.write(response.model_dump_json())


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
