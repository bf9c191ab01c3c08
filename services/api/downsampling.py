"""Downsamples long record files for a response: evenly spaced points, exact peaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from pydantic import BaseModel

from services.shared.jobs.planning.plan_vs_measured import PhaseMemory, PlannedPhases
from services.shared.jobs.run_directory import MemoryRecord, RunDirectory, read_records

RecordT = TypeVar("RecordT", bound=BaseModel)


class Series(BaseModel, Generic[RecordT]):
    """Every `stride`-th record of `total`, and the last one."""

    total: int
    stride: int
    points: list[RecordT]


class RankSeries(BaseModel):
    """The memory of one rank; `basis` names what its probe could measure."""

    rank: int
    basis: str | None
    device_total_bytes: int | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_host_rss_bytes: int | None
    phases: dict[str, PhaseMemory]
    series: Series[MemoryRecord]


def downsample(records: Iterable[RecordT], *, points: int) -> Series[RecordT]:
    """Return at most `points` evenly spaced records and the last, in one pass and O(points) memory."""
    kept: list[RecordT] = []
    stride, total = 1, 0
    last: RecordT | None = None
    for record in records:
        if total % stride == 0:
            kept.append(record)
        last = record
        total += 1
        if len(kept) > points:
            kept = kept[::2]
            stride *= 2
    if last is not None and kept[-1] is not last:
        kept.append(last)
    return Series(total=total, stride=stride, points=kept)


def rank_memory(run: RunDirectory, rank: int, *, planned: PlannedPhases, points: int) -> RankSeries:
    """Read one rank's memory file and compare its peaks with the phases of the plan."""
    peaks = _Peaks()
    records = (record for _, record in read_records(run.memory_file(rank), MemoryRecord))
    series = downsample(peaks.observe(records), points=points)
    return RankSeries(
        rank=rank,
        basis=peaks.basis,
        device_total_bytes=peaks.device_total,
        peak_allocated_bytes=peaks.allocated,
        peak_reserved_bytes=peaks.reserved,
        peak_host_rss_bytes=peaks.host_rss,
        phases=planned.compare(peaks.by_phase, basis=peaks.basis),
        series=series,
    )


class _Peaks:
    """The maxima of the records that pass through."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self.host_rss: int | None = None
        self.device_total: int | None = None
        self.basis: str | None = None
        self.by_phase: dict[str, int] = {}

    def observe(self, records: Iterable[MemoryRecord]) -> Iterator[MemoryRecord]:
        for record in records:
            self.allocated = max(self.allocated, record.peak_allocated_bytes)
            self.reserved = max(self.reserved, record.peak_reserved_bytes)
            if record.host_rss_bytes is not None:
                self.host_rss = max(self.host_rss or 0, record.host_rss_bytes)
            self.basis = record.basis or self.basis
            self.device_total = record.device_total_bytes or self.device_total
            previous = self.by_phase.get(record.phase, 0)
            self.by_phase[record.phase] = max(previous, record.peak_allocated_bytes)
            yield record
