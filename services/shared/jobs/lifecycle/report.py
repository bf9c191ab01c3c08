"""What is stored, how full the disk is and will be, and whether database and files belong together."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.lifecycle.disk import DiskUse, disk_use
from services.shared.jobs.lifecycle.epoch import EpochMismatch, check_epoch
from services.shared.jobs.lifecycle.usage import FORECAST_DAYS, Forecast, forecast


@dataclass(frozen=True)
class StorageReport:
    """The state of the storage of a platform."""

    disk: DiskUse
    full_share: float  # from which jobs wait
    stored_bytes: dict[str, int]  # by kind of file, at the last sample; empty before the first
    table_rows: dict[str, int]  # as the statistics of the database count them
    forecast: Forecast | None  # None while the samples span too little
    epoch_problem: str | None  # None where database and files belong together

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON document."""
        disk = {**asdict(self.disk), "path": str(self.disk.path), "share": self.disk.share}
        return {**asdict(self), "disk": disk}


def storage_report(lifecycle: LifecycleStore) -> StorageReport:
    """Return the state of the storage. Raises Unavailable, OSError."""
    settings = lifecycle.settings
    samples = lifecycle.usage_samples(days=FORECAST_DAYS)
    return StorageReport(
        disk=disk_use(settings.data_dir),
        full_share=settings.disk_full_share,
        stored_bytes=samples[-1].stored_bytes if samples else {},
        table_rows=lifecycle.table_rows(),
        forecast=forecast(samples, full_share=settings.disk_full_share),
        epoch_problem=_epoch_problem(lifecycle),
    )


def _epoch_problem(lifecycle: LifecycleStore) -> str | None:
    try:
        check_epoch(lifecycle)
    except EpochMismatch as mismatch:
        return str(mismatch)
    return None
