"""The run directory of one attempt: worker and ranks communicate through its files alone.

    <run>/spec.json            RunInput, written by the worker before torchrun starts
    <run>/plan.json            the memory plan, as stored with the job
    <run>/prepared.json        Prepared, what was measured and counted before the ranks start
    <run>/stop.json            StopRequest, written by the worker; ranks look at it every step
    <run>/heartbeat.json       WorkerHeartbeat, rewritten by the worker as long as it holds the job
    <run>/progress.jsonl       ProgressRecord, appended by rank 0
    <run>/ranks/<k>/memory.jsonl   MemoryRecord, appended by rank k
    <run>/ranks/<k>/failure.json   Failure, written by rank k while failing
    <run>/label_quality.json   LabelQuality, written by rank 0 of a teacher job
    <run>/report.json          Report, written last by rank 0: without it the run did not finish
    <run>/checkpoints/<name>/COMPLETE   written last: without it the checkpoint does not count
    <run>/export/

Whole files appear by rename after fsync; a reader never sees a partial file. Appended files may end in
half a line, which readers skip.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from services.shared.files.atomic_write import write_text
from services.shared.jobs.document_schema import StoredDocument
from services.shared.jobs.documents import (
    AllocatorDict,
    Evaluation,
    ModelHeadDict,
    ObservedShardingDict,
    RecipeFields,
)
from services.shared.jobs.spec import DistillSpec, TeacherSpec
from services.shared.jobs.state import Phase, Reason

COMPLETE = "COMPLETE"


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow")


class LayerSize(_Record):
    """The matrices that decide the speed of a layer."""

    hidden: int = 768
    intermediate: int = 3072


class MatmulTimes(_Record):
    """Seconds of one step (forward and backward) through a layer's two matrices, in either format."""

    processor: str
    threads: int
    size: LayerSize
    tokens: int
    float32_seconds: float
    bfloat16_seconds: float

    @property
    def gain(self) -> float:
        """Return how many times faster bfloat16 is."""
        return self.float32_seconds / self.bfloat16_seconds


class RunInput(_Record):
    """The input of the ranks, with every reference resolved to a path."""

    job_id: str
    attempt: int
    spec: TeacherSpec | DistillSpec
    dataset_dir: Path
    unlabelled_dirs: list[Path] = []
    model_dir: Path | None = None  # spec.model / spec.student, when it names a directory
    teacher_dir: Path | None = None  # distillation: the teacher's artifact or directory
    resume_dir: Path | None = None  # checkpoints of an earlier attempt
    recipe: RecipeFields = {}  # with `auto` resolved
    cache_dir: Path | None = None  # signals of teachers, shared by jobs
    measure: LayerSize | None = None  # for which the preparation is to measure the processor


class Prepared(_Record):
    """What was found out on the machine before the ranks start."""

    times: MatmulTimes | None = None  # where the recipe leaves the number format open
    vocabulary_rows: int | None = None  # that `trim_vocabulary` keeps
    vocabulary_rows_before: int | None = None


class StopRequest(_Record):
    """Requests the ranks to save and exit at the next step."""

    reason: Literal["cancelled", "handed_back", "timed_out"]


class WorkerHeartbeat(_Record):
    """Written by a worker with every heartbeat. Ranks stop by themselves when it is no longer renewed."""

    count: int  # grows with every heartbeat; ranks compare no clocks of two machines
    lease_seconds: float  # after which another worker may claim the job


class ProgressRecord(_Record):
    """One line of rank 0; fields that did not change may be left out."""

    time: float  # seconds since the epoch
    phase: Phase
    step: int | None = None
    total_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    padding_share: float | None = None
    evaluation: Evaluation | None = None
    message: str | None = None


class MemoryRecord(_Record):
    """The memory of one rank at one moment, in bytes; `observed` comes once, right after wrapping."""

    time: float
    phase: str  # load, wrap, forward, backward, optimizer_step, evaluation, export
    step: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    device_total_bytes: int | None = None
    host_rss_bytes: int | None = None
    basis: str | None = None  # what was counted: "allocator", or what the rank could walk
    observed: StoredDocument[ObservedShardingDict] | None = None


class Failure(_Record):
    """Why a rank failed, as it reported itself."""

    time: float
    rank: int
    phase: str
    step: int = 0
    reason: Reason
    message: str
    error_type: str = ""
    traceback: str = ""
    request_bytes: int | None = None
    allocator: StoredDocument[AllocatorDict] | None = None


class Report(_Record):
    """How the ranks ended, written last by rank 0."""

    outcome: Literal["succeeded", "stopped"]
    stop_reason: str | None = None
    steps: int = 0
    epochs: float = 0.0
    seconds: float = 0.0
    artifact: str | None = None  # relative to the run directory, normally "export"
    heads: list[StoredDocument[ModelHeadDict]] = []
    parameters: int = 0
    size_bytes: int = 0
    manifest_sha256: str | None = None
    evaluation: Evaluation = {}
    details: Mapping[str, Any] = {}  # padding share, best epoch, truncated texts ...


RecordT = TypeVar("RecordT", bound=BaseModel)


class RunDirectory:
    """Names and reads the files of one attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = path / "spec.json"
        self.plan = path / "plan.json"
        self.prepared = path / "prepared.json"
        self.stop = path / "stop.json"
        self.heartbeat = path / "heartbeat.json"
        self.progress = path / "progress.jsonl"
        self.report = path / "report.json"
        self.label_quality = path / "label_quality.json"
        self.log = path / "torchrun.log"
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"

    def rank_dir(self, rank: int) -> Path:
        return self.path / "ranks" / str(rank)

    def memory_file(self, rank: int) -> Path:
        return self.rank_dir(rank) / "memory.jsonl"

    def failure_file(self, rank: int) -> Path:
        return self.rank_dir(rank) / "failure.json"

    def ranks(self) -> list[int]:
        """Return the ranks that have written anything, in order."""
        root = self.path / "ranks"
        if not root.is_dir():
            return []
        return sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdigit())

    def failures(self) -> list[Failure]:
        """Return the failures that ranks have reported, the earliest first."""
        found = [read_record(self.failure_file(rank), Failure) for rank in self.ranks()]
        return sorted((f for f in found if f is not None), key=lambda f: f.time)


def write_json(path: Path, value: BaseModel | Mapping[str, object]) -> None:
    """Write a whole JSON file atomically. Raises OSError."""
    write_text(path, value.model_dump_json() if isinstance(value, BaseModel) else json.dumps(value))


def append_record(path: Path, record: BaseModel) -> None:
    """Append one JSON line, in one write. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(record.model_dump_json(exclude_none=True).encode() + b"\n")


def read_record(path: Path, kind: type[RecordT]) -> RecordT | None:
    """Return the record in `path`, or None where the file is absent or not such a record."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def read_records(
    path: Path, kind: type[RecordT], *, offset: int = 0
) -> Iterator[tuple[int, RecordT]]:
    """Yield (end offset, record) for every whole line after `offset` bytes; skip broken lines."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                yield offset, kind.model_validate_json(line)
            except ValidationError:
                continue
