"""Ingests an upload in a process with limits of its own, for a format that unpacks to more than its size.

A Parquet file of a kilobyte may hold a text of a gigabyte, or a list of a billion nulls, and what its
metadata says of that may be a lie. Nothing in Arrow bounds what it allocates, so the kernel does: the
process of the caller goes on, and the upload is refused. (JSONL and CSV are read line by line, and no
line is longer than MAX_LINE_BYTES: they need no process.)
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
_OUT_OF_MEMORY = (
    3  # exit code; a process that is killed, or aborts within Arrow, has a negative one
)
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class _Task(BaseModel):
    """What the process is given on its standard input."""

    upload: Path
    format: Format
    layout: Layout
    id: str
    name: str
    datasets_dir: Path
    memory_bytes: int


class _Answer(BaseModel):
    """What the process says on its standard output; one of the three."""

    card: DatasetCard | None = None
    faults: list[Fault] = []
    total: int = 0
    errno: int | None = None
    message: str = ""


def ingest_confined(
    upload: Path,
    *,
    format: Format,
    layout: Layout,
    id: str,
    name: str,
    datasets_dir: Path,
    memory_bytes: int,
) -> DatasetCard:
    """Do what `ingest` does in a process that may map no more than `memory_bytes`.

    Raises DatasetRejected, also where that was too little, OSError of the disk, and RuntimeError with the
    last line of what the process said where it broke otherwise.
    """
    task = _Task(
        upload=upload.absolute(),
        format=format,
        layout=Layout.model_validate(layout.model_dump(include=set(Layout.model_fields))),
        id=id,
        name=name,
        datasets_dir=datasets_dir.absolute(),
        memory_bytes=memory_bytes,
    )
    done = subprocess.run(
        [sys.executable, "-m", "services.shared.datasets.confined"],
        input=task.model_dump_json().encode(),
        capture_output=True,
        check=False,
        cwd=Path(__file__).resolve().parents[3],  # where `services` imports from
        # It reads what a stranger may have made: it gets no passwords, and no threads that it would not use.
        env={k: v for k, v in os.environ.items() if not k.startswith("STILLHOUSE_")}
        | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        for left in datasets_dir.glob(f".{id}.*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        if done.returncode > 0 and done.returncode != _OUT_OF_MEMORY:
            last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise RuntimeError(f"the process that reads an upload broke: {last}")
        message = (
            f"cannot be read within {memory_bytes:,} bytes of memory; send it as JSONL, or in parts"
        )
        raise DatasetRejected([Fault(line=None, field=None, message=message)], 1)
    answer = _Answer.model_validate_json(done.stdout)
    if answer.card is not None:
        return answer.card
    if answer.errno is not None:
        raise OSError(answer.errno, answer.message)
    raise DatasetRejected(answer.faults, answer.total)


def main() -> None:
    """Ingest what standard input names; a process that dies of its limits has said nothing."""
    task = _Task.model_validate_json(sys.stdin.buffer.read())
    _confine(task.memory_bytes)
    try:
        card = ingest(
            task.upload,
            format=task.format,
            layout=task.layout,
            id=task.id,
            name=task.name,
            datasets_dir=task.datasets_dir,
        )
        answer = _Answer(card=card)
    except DatasetRejected as refused:
        answer = _Answer(faults=refused.faults, total=refused.total)
    except MemoryError:
        sys.exit(_OUT_OF_MEMORY)
    except OSError as error:
        if error.errno is None:
            raise
        answer = _Answer(errno=error.errno, message=error.strerror or "")
    sys.stdout.write(answer.model_dump_json())


def _confine(memory_bytes: int) -> None:
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CPU, _CPU_SECONDS)
    _limit(resource.RLIMIT_CORE, 0)
    if _OOM_SCORE.exists():  # where memory is short all the same, this process goes first
        _OOM_SCORE.write_text("1000")


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]  # nobody but root may go beyond it
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (allowed, allowed))


if __name__ == "__main__":
    main()
